"""anthropic: models, messages, stream, tools over two turns (whole, streamed, with a failed
result), a document of text, counting.
"""

import os

from anthropic import Anthropic, NotFoundError

MODEL = os.environ["MODEL"]
client = Anthropic(base_url=os.environ["URL"], api_key="none")
GREEDY = {"extra_body": {"temperature": 0}}
HELLO = [{"role": "user", "content": "Say hello."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]

listed = client.models.list(limit=1000)
assert MODEL in [model.id for model in listed]
assert client.models.retrieve(MODEL).display_name == MODEL
whole = client.messages.create(model=MODEL, max_tokens=10, messages=HELLO, **GREEDY)
assert whole.content[0].text
assert whole.usage.output_tokens == 10
with client.messages.stream(model=MODEL, max_tokens=10, messages=HELLO, **GREEDY) as stream:
    assert "".join(stream.text_stream) == whole.content[0].text
counted = client.messages.count_tokens(model=MODEL, messages=HELLO)
assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens

asked = [{"role": "user", "content": "How is the weather in Rome?"}]
called = client.messages.create(
    model=MODEL, max_tokens=200, messages=asked, tools=TOOLS,
    tool_choice={"type": "tool", "name": "weather"},
)  # fmt: skip
[use] = [block for block in called.content if block.type == "tool_use"]
assert use.input["city"] in ("Oslo", "Rome")
result = {"type": "tool_result", "tool_use_id": use.id, "content": "no network", "is_error": True}
told = [*asked, {"role": "assistant", "content": called.content}]
told.append({"role": "user", "content": [result]})
after = client.messages.create(
    model=MODEL, max_tokens=20, messages=told, tools=TOOLS, tool_choice={"type": "none"}
)
assert after.content[0].text
assert after.stop_reason in ("end_turn", "max_tokens")

# The same as a stream.
with client.messages.stream(
    model=MODEL, max_tokens=200, messages=asked, tools=TOOLS, tool_choice={"type": "any"}
) as stream:
    streamed = stream.get_final_message()
use = next(block for block in streamed.content if block.type == "tool_use")
again = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
turn = [*asked, {"role": "assistant", "content": streamed.content}]
turn.append({"role": "user", "content": [again]})
with client.messages.stream(model=MODEL, max_tokens=20, messages=turn) as stream:
    assert "".join(stream.text_stream)

source = {"type": "text", "media_type": "text/plain", "data": "A penstock carries water."}
read = client.messages.create(
    model=MODEL, max_tokens=10, messages=[{"role": "user", "content": [
        {"type": "document", "source": source}, {"type": "text", "text": "What does it carry?"},
    ]}],
)  # fmt: skip
assert read.usage.input_tokens + read.usage.cache_read_input_tokens > 10
plain = [*told[:-1], {"role": "user", "content": [{**result, "is_error": False}]}]
failed_tokens = client.messages.count_tokens(model=MODEL, messages=told, tools=TOOLS)
assert (
    failed_tokens.input_tokens
    > client.messages.count_tokens(model=MODEL, messages=plain, tools=TOOLS).input_tokens
)
try:
    client.messages.create(model="nobody", max_tokens=1, messages=HELLO)
except NotFoundError:
    pass
else:
    raise AssertionError("an unknown model was answered")
