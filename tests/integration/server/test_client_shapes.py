"""Shapes of fields that clients send to every server, whichever it was made for: taken where they
mean something here, refused by name where they do not. Over a fake worker.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator

HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS = [{"type": "function", **FUNCTION}]
THINKER = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "assistant: {% if enable_thinking is defined and not enable_thinking %}<think>\n</think>\n"
    "{% else %}<think>\n{% endif %}"
)
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA = "/v1/messages", "/api/chat"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 3},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 3},
    RESPONSES: {"input": "hi", "max_output_tokens": 3},
    MESSAGES: {"messages": HI, "max_tokens": 3},
    OLLAMA: {"model": "echo", "messages": HI, "stream": False},
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "echo")
    add_model(home, "caller", FakeModel(answer=CALL))
    add_model(home, "thinker", FakeModel(answer="hm hm\n</think>\n\nWell."), THINKER)
    with (
        serving(home, models_default="echo") as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def ask(client: httpx.Client, path: str, status: int = 200, **fields: Any) -> Any:
    answer = client.post(path, json={**PROMPTS[path], **fields})
    assert answer.status_code == status, answer.text
    return answer.json()


# --- numbers ---


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"max_tokens": 3.0, "n": 1.0, "top_k": 2.0, "seed": 7.0, "min_tokens": 1.0}),
        (CHAT, {"logprobs": True, "top_logprobs": 2.0, "priority": 1.0, "repeat_last_n": 8.0}),
        (CHAT, {"thinking_budget": 8.0, "thinking": {"type": "enabled", "budget_tokens": 8.0}}),
        (COMPLETIONS, {"max_tokens": 3.0, "logprobs": 2.0, "best_of": 1.0, "n": 1.0}),
        (RESPONSES, {"max_output_tokens": 3.0, "max_tool_calls": 2.0, "seed": 1e3, "top_k": 1.0}),
        (MESSAGES, {"max_tokens": 3.0, "top_k": 2.0, "thinking": {"type": "enabled"}}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 8.0}}),
        (OLLAMA, {"options": {"num_ctx": 512.0, "seed": 7.0, "top_k": 2.0, "num_predict": 3.0}}),
        (OLLAMA, {"logprobs": True, "top_logprobs": 2.0, "options": {"num_predict": 3}}),
    ],
)
def test_whole_numbers_written_as_floats(
    client: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    ask(client, path, **fields)


@pytest.mark.parametrize(
    ("path", "name"),
    [(CHAT, "top_k"), (COMPLETIONS, "n"), (RESPONSES, "seed"), (MESSAGES, "max_tokens")],
)
def test_halves_are_refused_by_name(client: httpx.Client, path: str, name: str) -> None:
    said = ask(client, path, 400, **{name: 1.5})
    assert f"`{name}` is 1.5; it is a whole number." in said["error"]["message"]


def test_no_limit_by_minus_one(client: httpx.Client) -> None:
    said = ask(client, RESPONSES, max_output_tokens=-1, input="h" * 40)
    assert said["status"] == "completed" or said["usage"]["output_tokens"] > 3
    assert said["max_output_tokens"] is None
    assert "`max_output_tokens` is 0" in str(ask(client, RESPONSES, 400, max_output_tokens=0))


# --- sampling of other servers ---


@pytest.mark.parametrize("name", ["n_predict", "max_new_tokens", "max_output_tokens"])
def test_other_names_of_the_limit(client: httpx.Client, name: str) -> None:
    said = ask(client, CHAT, max_tokens=None, **{name: 2})
    assert said["usage"]["completion_tokens"] == 2
    said = ask(client, COMPLETIONS, max_tokens=None, **{name: 2})
    assert said["usage"]["completion_tokens"] == 2
    refused = ask(client, CHAT, 400, max_tokens=5, **{name: 2})
    assert "two names of one field" in refused["error"]["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_other_names_of_the_limit_of_responses(client: httpx.Client, name: str) -> None:
    said = ask(client, RESPONSES, max_output_tokens=None, **{name: 2})
    assert (said["usage"]["output_tokens"], said["max_output_tokens"]) == (2, 2)


def test_penalties_over_the_latest_tokens(client: httpx.Client) -> None:
    for path in (CHAT, COMPLETIONS, RESPONSES):
        ask(client, path, repeat_penalty=1.1, repeat_last_n=64)
    ask(client, OLLAMA, options={"repeat_penalty": 1.1, "repeat_last_n": 64, "num_predict": 3})
    refused = ask(client, CHAT, 400, repeat_penalty=1.1, repetition_penalty=1.2)
    assert "two names of one field" in refused["error"]["message"]
    refused = ask(client, CHAT, 400, repeat_penalty=1.1, repeat_last_n=5000)
    assert refused["error"]["param"] == "repeat_last_n"


@pytest.mark.parametrize(
    "name",
    ["typ_p", "typical_p", "typical", "num_beams", "min_length", "top_a", "mirostat",
     "mirostat_mode", "no_repeat_ngram_size", "smoothing_factor", "penalty_alpha"],
)  # fmt: skip
def test_sampling_that_is_not_kept_is_refused_by_name(client: httpx.Client, name: str) -> None:
    for path in (CHAT, COMPLETIONS, RESPONSES):
        said = ask(client, path, 400, **{name: 2})
        assert said["error"]["param"] == name
        ask(client, path, **{name: 0})


def test_biases_as_pairs(client: httpx.Client) -> None:
    for biases in ([[65, -5.0], [66, False]], [["65", 1]], [], {"65": 2}, None):
        ask(client, CHAT, logit_bias=biases)
    said = ask(client, CHAT, 400, logit_bias=[["Hello", -5.0]])
    assert "keys are token ids" in said["error"]["message"]
    assert "true" in ask(client, CHAT, 400, logit_bias=[[65, True]])["error"]["message"]
    assert "1024" in str(ask(client, CHAT, 400, logit_bias=[[token, 1] for token in range(1025)]))


def test_an_empty_stop_is_none(client: httpx.Client) -> None:
    nothings: tuple[Any, ...] = ("", [], None)
    for stop in nothings:
        assert ask(client, CHAT, stop=stop)["choices"][0]["finish_reason"] == "length"
    assert ask(client, CHAT, 400, stop=["", "a"])["error"]["param"] == "stop"


# --- reasoning ---


def thought(client: httpx.Client, **fields: Any) -> str:
    said = ask(client, CHAT, model="thinker", max_tokens=50, **fields)
    return str(said["choices"][0]["message"].get("reasoning_content", ""))


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
        {"reasoning": {"effort": "none"}},
        {"reasoning_effort": "none"},
    ],
)
def test_reasoning_switched_off(client: httpx.Client, fields: dict[str, Any]) -> None:
    """The template is told; the fake model says the same all the same, now as text."""
    tokens = ask(client, CHAT, model="thinker")["usage"]["prompt_tokens"]
    said = ask(client, CHAT, model="thinker", **fields)
    assert said["usage"]["prompt_tokens"] == tokens + len("</think>\n")


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": True, "thinking": {"type": "enabled"}, "reasoning": {"enabled": True}},
        {"reasoning_budget": -1},
        {"thinking": {"type": "adaptive"}},
    ],
)
def test_reasoning_switched_on(client: httpx.Client, fields: dict[str, Any]) -> None:
    assert thought(client, **fields) == "hm hm\n"


def test_reasoning_that_is_left_out(client: httpx.Client) -> None:
    assert thought(client, reasoning={"exclude": True}) == ""


def test_reasoning_said_twice(client: httpx.Client) -> None:
    for fields in (
        {"enable_thinking": True, "thinking": False},
        {"reasoning_effort": "low", "reasoning": {"effort": "high"}},
        {"thinking_budget": 3, "reasoning": {"max_tokens": 4}},
    ):
        said = ask(client, CHAT, 400, model="thinker", **fields)
        assert "say different things" in said["error"]["message"]


# --- forms of the answer, tools ---


def test_a_schema_beside_json_object_of_responses(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    for wanted in (
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "name": "x", "schema": schema},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    ):
        said = ask(client, RESPONSES, text={"format": wanted})
        assert said["text"]["format"]["schema"] == schema
    # What can be refused of a schema only is, if it was read.
    refused = ask(
        client, RESPONSES, 400, text={"format": {"type": "json_object", "schema": {"not": {}}}}
    )
    assert refused["error"]["param"].startswith("text.format")
    refused = ask(client, RESPONSES, 400, text={"format": {"type": "json_schema", "name": "x"}})
    assert "schema` is missing" in refused["error"]["message"]


@pytest.mark.parametrize(
    "choice",
    [
        "any",
        {"type": "any"},
        {"type": "required"},
        {"type": "function", "name": "look"},
        {"type": "function", "function": {"name": "look"}},
        {"type": "tool", "name": "look"},
        {"type": "any", "disable_parallel_tool_use": True},
    ],
)
def test_choices_of_other_protocols(client: httpx.Client, choice: Any) -> None:
    said = ask(client, CHAT, model="caller", tools=TOOLS, tool_choice=choice, max_tokens=80)
    assert said["choices"][0]["finish_reason"] == "tool_calls"
    said = ask(client, RESPONSES, model="caller", tools=FLAT_TOOLS, tool_choice=choice,
               max_output_tokens=80)  # fmt: skip
    assert said["output"][0]["type"] == "function_call"
    assert ask(client, CHAT, 400, tool_choice=choice)["error"]["param"] == "tool_choice"


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "none"}, None])
def test_choices_that_force_nothing(client: httpx.Client, choice: Any) -> None:
    ask(client, CHAT, tools=TOOLS, tool_choice=choice)
    ask(client, CHAT, tool_choice=choice)


@pytest.mark.parametrize("arguments", [{"at": "it"}, '{"at": "it"}', "{}", None, {}, "no JSON"])
def test_arguments_of_a_call_as_an_object(client: httpx.Client, arguments: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    told = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": None}]  # fmt: skip
    ask(client, CHAT, messages=told, tools=TOOLS)
    item = {"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments}
    first = ask(client, RESPONSES, input=[*HI, item])
    ask(client, RESPONSES, previous_response_id=first["id"])


def test_arguments_that_are_no_object(client: httpx.Client) -> None:
    for arguments in (3, [1]):
        call = {"id": "c", "function": {"name": "look", "arguments": arguments}}
        told = [*HI, {"role": "assistant", "tool_calls": [call]}]
        assert "tool_calls" in ask(client, CHAT, 400, messages=told)["error"]["param"]


@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool"])
def test_null_contents(client: httpx.Client, role: str) -> None:
    message: dict[str, Any] = {"role": role, "content": None}
    ask(client, CHAT, messages=[message, *HI])
    ask(client, OLLAMA, messages=[message, *HI], options={"num_predict": 3})
    if role != "tool":
        ask(client, RESPONSES, input=[message, *HI])
    refused = ask(client, CHAT, 400, messages=[{"role": "user"}])
    assert refused["error"]["param"] == "messages[0].content"


def test_tools_in_the_shape_of_another_protocol(client: httpx.Client) -> None:
    for path, usual, other in ((CHAT, TOOLS, FLAT_TOOLS), (RESPONSES, FLAT_TOOLS, TOOLS)):
        counts = {json.dumps(ask(client, path, tools=tools)["usage"]) for tools in (usual, other)}
        assert len(counts) == 1


def test_parts_in_the_shape_of_another_protocol(client: httpx.Client) -> None:
    parts = [{"type": "input_text", "text": "one"}, {"type": "output_text", "text": "two"}]
    said = ask(client, CHAT, messages=[{"role": "user", "content": parts}], max_tokens=15)
    assert said["choices"][0]["message"]["content"] == "user: one\ntwo\na"
    thought = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "one"}]
    told = [*HI, {"role": "assistant", "content": thought}, *HI]
    plain = [*HI, {"role": "assistant", "content": "one", "reasoning_content": "hm"}, *HI]
    counts = {ask(client, CHAT, messages=each)["usage"]["prompt_tokens"] for each in (told, plain)}
    assert len(counts) == 1


def test_what_is_sent_is_what_is_rendered(client: httpx.Client) -> None:
    """A call given as an object reaches the template as one given in a string."""
    counts = set()
    for arguments in ({"at": "it"}, json.dumps({"at": "it"})):
        call = {"id": "c", "type": None, "function": {"name": "look", "arguments": arguments}}
        told = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}, *HI]
        counts.add(ask(client, CHAT, messages=told)["usage"]["prompt_tokens"])
    assert len(counts) == 1
