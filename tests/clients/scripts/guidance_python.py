"""guidance by an OpenAI-compatible address: a chat with generated text; by its vLLM kind: a
choice, two regular expressions.
"""

import os
import re

import guidance
from guidance import assistant, gen, regex, select, user
from guidance.models.experimental import VLLMModel

URL, MODEL = os.environ["URL"] + "/v1", os.environ["MODEL"]

model = guidance.models.OpenAI(MODEL, base_url=URL, api_key="none", echo=False)
with user():
    model += "Say hello."
with assistant():
    model += gen("hello", max_tokens=10)
assert model["hello"]
with user():
    model += "Again."
with assistant():
    model += gen("again", max_tokens=10)
assert model["again"]

held = VLLMModel(MODEL, base_url=URL, api_key="none", echo=False)
with user():
    held += "Ada or Grace? And in which year?"
with assistant():
    held += select(["Ada", "Grace"], name="who")
assert held["who"] in ("Ada", "Grace")
with user():
    held += "And in which year?"
with assistant():
    held += regex("(18|19)[0-9]{2}", name="year")
assert re.fullmatch("(18|19)[0-9]{2}", held["year"]), held["year"]
with user():
    held += "Which letter?"
with assistant():
    held += gen("letter", regex="[A-F]")
assert re.fullmatch("[A-F]", held["letter"]), held["letter"]
