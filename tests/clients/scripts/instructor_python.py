"""instructor: a Pydantic model by tools and by a schema."""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel

MODEL = os.environ["MODEL"]


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ada", "Grace"]
    swims: bool


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(
        OpenAI(base_url=os.environ["URL"] + "/v1", api_key="none"), mode=mode
    )
    person = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Invent a person."}],
        response_model=Person,
        max_tokens=100,
        max_retries=0,
    )
    assert isinstance(person, Person), mode
