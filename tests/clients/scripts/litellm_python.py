"""litellm: its OpenAI, Anthropic and Ollama providers: chat, stream, tools, a schema."""

import json
import os

import litellm
from pydantic import BaseModel

URL, MODEL = os.environ["URL"], os.environ["MODEL"]
HELLO = [{"role": "user", "content": "Say hello."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
WAYS = [
    {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"},
    {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"},
    {"model": f"ollama_chat/{MODEL}", "api_base": URL},
    {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1"},
]
for way in WAYS:
    whole = litellm.completion(messages=HELLO, max_tokens=10, **way)
    assert whole.choices[0].message.content, way
    pieces = litellm.completion(messages=HELLO, max_tokens=10, stream=True, **way)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces), way


class Person(BaseModel):
    swims: bool


answer = litellm.completion(messages=HELLO, response_format=Person, max_tokens=200, **WAYS[0])
Person.model_validate_json(answer.choices[0].message.content)
for way in WAYS[:2]:
    choice = {"type": "function", "function": {"name": "weather"}}
    called = litellm.completion(
        messages=HELLO, tools=TOOLS, tool_choice=choice, max_tokens=200, **way
    )
    [call] = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
text = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}", api_base=f"{URL}/v1", api_key="none",
    prompt="One, two,", max_tokens=5,
)  # fmt: skip
assert text.choices[0].text
