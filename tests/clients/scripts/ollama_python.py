"""ollama: list, show, ps, pull, chat, stream, generate (context, raw, usual options, a suffix that
is refused), a schema, tools over two turns, logprobs, names with a tag.
"""

import json
import os

from ollama import Client, ResponseError

MODEL = os.environ["MODEL"]
client = Client(os.environ["URL"])
HELLO = [{"role": "user", "content": "Say hello."}]
SHORT = {"num_predict": 10, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"swims": {"type": "boolean"}},
    "required": ["swims"],
    "additionalProperties": False,
}


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: where
    """
    return f"It is sunny in {city}."


assert MODEL in [model.model for model in client.list().models]
assert all(len(model.digest) == 64 for model in client.list().models)
assert "completion" in client.show(f"{MODEL}:latest").capabilities
assert client.pull(MODEL).status == "success"
assert [line.status for line in client.pull(MODEL, stream=True)][-1] == "success"
whole = client.chat(MODEL, HELLO, options=SHORT, keep_alive="10m", logprobs=True, top_logprobs=2)
assert whole.message.content
assert len(whole.logprobs) == whole.eval_count == 10
assert whole.eval_count / (whole.eval_duration / 1e9) < 5000  # as fast as this model can be
pieces = list(client.chat(MODEL, HELLO, options=SHORT, stream=True))
assert "".join(piece.message.content for piece in pieces) == whole.message.content
assert MODEL in [model.model for model in client.ps().models]
first = client.generate(MODEL, "My name is Ada.", options=SHORT)
second = client.generate(MODEL, "Who am I?", context=first.context, options=SHORT)
assert second.prompt_eval_count > first.prompt_eval_count
raw = client.generate(MODEL, "One, two,", raw=True, options=SHORT)
assert raw.response
assert raw.context is None
usual = {**SHORT, "num_ctx": 2048, "num_keep": 5, "repeat_last_n": 64}  # of programs with settings
same = client.generate(MODEL, "One, two,", raw=True, options=usual)
assert same.response == raw.response
try:
    client.generate(MODEL, "def f(", suffix="return x", options=SHORT)
except ResponseError as error:
    assert "filling in the middle" in error.error  # this model was not made for it
else:
    raise AssertionError("a suffix was left out in silence")
formed = client.chat(MODEL, HELLO, format=SCHEMA, options={"num_predict": 200})
assert isinstance(json.loads(formed.message.content)["swims"], bool)
asked = [{"role": "user", "content": "How is the weather in Rome?"}]
called = client.chat(MODEL, asked, tools=[weather], options={"num_predict": 40})
# A model as small as this calls when it likes; its turn is written where it does not.
call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
calls = called.message.tool_calls or [call]
results = [{"role": "tool", "tool_name": "weather", "content": weather("Rome")} for _ in calls]
turn = {"role": "assistant", "content": called.message.content, "tool_calls": calls}
final = client.chat(MODEL, [*asked, turn, *results], options={"num_predict": 20})
assert final.message.content
one = client.chat(f"{MODEL}:latest", HELLO, options={"num_predict": 1})
assert (one.model, one.eval_count) == (f"{MODEL}:latest", 1)
assert one.eval_duration > 0
try:
    client.embed(MODEL, "x")
except ResponseError as error:
    assert "is of the kind 'generate'" in error.error
try:
    client.chat("nobody", HELLO)
except ResponseError as error:
    assert error.status_code == 404
