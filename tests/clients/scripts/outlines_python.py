"""outlines by an OpenAI client and by its vLLM kind: text, a schema, a regular expression."""

import os
import re
from typing import Literal

import outlines
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=os.environ["URL"] + "/v1", api_key="none")
MODEL = os.environ["MODEL"]


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ada", "Grace"]
    swims: bool


openai = outlines.from_openai(client, MODEL)
assert openai("Say hello.", max_tokens=10)
assert Person.model_validate_json(openai("Invent a person.", Person, max_tokens=100))
vllm = outlines.from_vllm(client, MODEL)
assert Person.model_validate_json(vllm("Invent a person.", Person, max_tokens=100))
assert vllm("Ada or Grace?", Literal["Ada", "Grace"], max_tokens=10) in ("Ada", "Grace")
assert re.fullmatch("[0-9]{4}", vllm("A year:", outlines.regex("[0-9]{4}"), max_tokens=200))
