"""openai: chat, stream, tools over two turns (chat, stream, responses), structured output, item
references, a custom tool, completions.
"""

import json
import os
from typing import Literal

from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
client = OpenAI(base_url=os.environ["URL"] + "/v1", api_key="none")
HELLO = [{"role": "user", "content": "Say hello."}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]

assert MODEL in [model.id for model in client.models.list()]
whole = client.chat.completions.create(
    model=MODEL, messages=HELLO, max_tokens=10, temperature=0, logprobs=True, top_logprobs=2
)
assert whole.choices[0].message.content
assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens == 10
assert whole.system_fingerprint.startswith("fp_")
pieces = client.chat.completions.create(
    model=MODEL, messages=HELLO, max_tokens=10, temperature=0, stream=True
)
streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
assert streamed == whole.choices[0].message.content


class Person(BaseModel):
    name: Literal["Ada", "Grace"]
    swims: bool


parsed = client.chat.completions.parse(
    model=MODEL, messages=HELLO, response_format=Person, max_tokens=200
)
assert isinstance(parsed.choices[0].message.parsed, Person)

asked = [{"role": "user", "content": "How is the weather in Rome?"}]
choice = {"type": "function", "function": {"name": "weather"}}
first = client.chat.completions.create(
    model=MODEL, messages=asked, tools=TOOLS, tool_choice=choice, max_tokens=200
)
message = first.choices[0].message
[call] = message.tool_calls
assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
told = [*asked, message.to_dict(), result]
second = client.chat.completions.create(
    model=MODEL, messages=told, tools=TOOLS, tool_choice="none", max_tokens=20
)
assert second.choices[0].message.content
assert second.choices[0].finish_reason in ("stop", "length")

# The same as a stream: the calls are put together from their pieces.
with client.chat.completions.stream(
    model=MODEL, messages=asked, tools=TOOLS, tool_choice="required", max_tokens=200,
    parallel_tool_calls=False,
) as stream:  # fmt: skip
    message = stream.get_final_completion().choices[0].message
[call] = message.tool_calls
result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
pieces = client.chat.completions.create(
    model=MODEL, messages=[*asked, message.to_dict(), result], max_tokens=20, stream=True
)
assert "".join(piece.choices[0].delta.content or "" for piece in pieces)
allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [choice]}}
limited = client.chat.completions.create(
    model=MODEL, messages=asked, tools=TOOLS, tool_choice=allowed, max_tokens=200,
    parallel_tool_calls=False,
)  # fmt: skip
assert limited.choices[0].message.tool_calls[0].function.name == "weather"

answer = client.responses.create(
    model=MODEL,
    input="Say hello.",
    max_output_tokens=10,
    include=["message.output_text.logprobs"],
    top_logprobs=1,
)
assert len(answer.output[0].content[0].logprobs) > 5
more = client.responses.create(
    model=MODEL, input="Again.", previous_response_id=answer.id, max_output_tokens=5,
    truncation="auto", max_tool_calls=4, extra_body={"top_k": 1},
)  # fmt: skip
assert (more.truncation, more.max_tool_calls) == ("auto", 4)
assert more.usage.input_tokens > answer.usage.input_tokens

function = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
first = client.responses.create(
    model=MODEL, input="How is the weather in Rome?", tools=[function],
    tool_choice={"type": "function", "name": "weather"}, max_output_tokens=200,
)  # fmt: skip
[call] = [item for item in first.output if item.type == "function_call"]
result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
second = client.responses.create(
    model=MODEL, input=[result], previous_response_id=first.id, tools=[function],
    tool_choice="none", max_output_tokens=20,
)  # fmt: skip
assert second.output_text
# Without the earlier response: its items by their ids, or as they are.
earlier = [client.responses.input_items.list(first.id).data[0].id, call.id]
for history in (
    [{"type": "item_reference", "id": item_id} for item_id in earlier],
    [{"role": "user", "content": "How is the weather in Rome?"}, call.to_dict()],
):
    third = client.responses.create(
        model=MODEL, input=[*history, result], tools=[function], tool_choice="none",
        max_output_tokens=20,
    )  # fmt: skip
    assert third.output_text
    assert third.usage.input_tokens == second.usage.input_tokens
note = {"type": "custom", "name": "note", "description": "Writes a note."}
written = client.responses.create(
    model=MODEL, input="Note: hello.", tools=[note], tool_choice={"type": "custom", "name": "note"},
    max_output_tokens=60, temperature=0,
)  # fmt: skip
assert written.output[0].type == "custom_tool_call"
counted = client.responses.input_tokens.count(model=MODEL, input="Say hello.")
assert counted.input_tokens == answer.usage.input_tokens
items = client.responses.input_items.list(answer.id)
assert items.data[0].content[0].text == "Say hello."
with client.responses.stream(
    model=MODEL, input="Say hello.", text_format=Person, max_output_tokens=200
) as events:
    kinds = {event.type for event in events}
    assert "response.completed" in kinds
    assert isinstance(events.get_final_response().output_parsed, Person)

try:
    client.responses.create(model=MODEL, input="Again.", prompt={"id": "pmpt_1"})
except BadRequestError as error:
    assert error.param == "prompt"
else:
    raise AssertionError("a stored prompt was left out in silence")

text = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=5, echo=True)
assert text.choices[0].text.startswith("One, two,")
try:
    client.chat.completions.create(model="nobody", messages=HELLO)
except NotFoundError as error:
    assert error.code == "model_not_found"
else:
    raise AssertionError("an unknown model was answered")
