"""haystack: its OpenAI chat generator, whole, streamed and with a tool."""

import os

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
weather = Tool(
    name="weather", description="The weather.", parameters=SCHEMA, function=lambda city: city
)
pieces = []


def generator(**settings):
    return OpenAIChatGenerator(
        model=os.environ["MODEL"],
        api_base_url=os.environ["URL"] + "/v1",
        api_key=Secret.from_token("none"),
        **settings,
    )


hello = [ChatMessage.from_user("Say hello.")]
whole = generator(generation_kwargs={"max_tokens": 10}).run(hello)
assert whole["replies"][0].text
generator(generation_kwargs={"max_tokens": 10}, streaming_callback=pieces.append).run(hello)
assert len(pieces) > 2
choice = {"type": "function", "function": {"name": "weather"}}
called = generator(
    tools=[weather], generation_kwargs={"max_tokens": 200, "tool_choice": choice}
).run(hello)
[call] = called["replies"][0].tool_calls
assert call.arguments["city"] in ("Oslo", "Rome")
result = ChatMessage.from_tool(tool_result="sunny", origin=call)
again = generator(tools=[weather], generation_kwargs={"max_tokens": 10})
assert again.run([*hello, called["replies"][0], result])["replies"]
