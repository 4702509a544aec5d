"""Chat answers that are more than text: reasoning, calls, forms, continued messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
# Shows what it was given, so that the echo of a fake worker tells it.
TELLING = (
    "{{ reasoning_effort }} {{ enable_thinking }} {{ extra }} {{ messages[-1].content }}"
    "{% if tools %}<tool_call>{% endif %}"
)
BLIND = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"

LISTING = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}\n"
    "{% endfor %}{# tools #}"
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home: Path = tmp_path_factory.mktemp("home")
    add_model(home, "echo")
    add_model(home, "telling", template=TELLING)
    add_model(home, "blind", template=BLIND)
    add_model(home, "listing", template=LISTING)
    calls = CALL % "Paris" + "\n" + CALL % "Rome"
    add_model(home, "caller", FakeModel(answer=calls))
    thinker = "<think>\nWhy not.\n</think>\n\nYes."
    template = BLIND + "{# <think></think> tools #}"
    add_model(home, "thinker", FakeModel(answer=thinker), template)
    with (
        serving(home, models_default="echo") as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def chat(client: httpx.Client, status: int = 200, **fields: Any) -> Any:
    answer = client.post("/v1/chat/completions", json={"messages": HI, **fields})
    assert answer.status_code == status, answer.text
    return answer.json() if status != 200 else answer.json()["choices"][0]


def deltas(client: httpx.Client, **fields: Any) -> list[Any]:
    body = {"messages": HI, "stream": True, **fields}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines[:-1]]


def test_calls_whole_and_streamed(client: httpx.Client) -> None:
    choice = chat(client, model="caller", tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    made = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
    assert made == ['{"city": "Paris"}', '{"city": "Rome"}']
    streamed: dict[int, str] = {}
    choices = deltas(client, model="caller", tools=TOOLS)
    for each in choices:
        for call in each["delta"].get("tool_calls", []):
            if "id" in call:
                assert call["function"]["name"] == "weather"
                assert call["index"] == len(streamed)
                streamed[call["index"]] = ""
            streamed[call["index"]] += call["function"]["arguments"]
    assert list(streamed.values()) == made
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert not any(each["delta"].get("content") for each in choices)


def test_reasoning_is_apart(client: httpx.Client) -> None:
    message = chat(client, model="thinker")["message"]
    assert message["reasoning_content"] == "Why not.\n"
    assert message["content"] == "Yes."
    choices = deltas(client, model="thinker")
    said = "".join(each["delta"].get("content", "") for each in choices)
    thought = "".join(each["delta"].get("reasoning_content", "") for each in choices)
    assert (said, thought) == ("Yes.", "Why not.\n")


def test_what_the_template_is_told(client: httpx.Client) -> None:
    told = chat(client, model="telling", reasoning_effort="low", max_tokens=8)
    assert told["message"]["content"].startswith("low")
    off = chat(client, model="telling", reasoning_effort="none", max_tokens=7)
    assert off["message"]["content"] == " False "
    extra = chat(client, model="telling", chat_template_kwargs={"extra": "E"}, max_tokens=3)
    assert extra["message"]["content"] == "  E"


def test_a_template_without_tools_is_helped(client: httpx.Client) -> None:
    messages = [
        *HI,
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    told = chat(client, model="blind", messages=messages, tools=TOOLS)["message"]["content"]
    assert told.startswith("system: You can call these functions")
    assert '"name": "weather"' in told
    assert "user: <tool_response>\nsunny\n</tool_response>" in told


def test_calls_by_their_older_name_in_a_history(client: httpx.Client) -> None:
    def heard(call: Any, answer: Any) -> str:
        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, **call},
            {"content": "rain", **answer},
        ]
        said = chat(client, model="listing", messages=messages, max_tokens=200)
        return str(said["message"]["content"])

    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    older = heard({"function_call": function}, {"role": "function", "name": "weather"})
    newer = heard(
        {"tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c"},
    )
    assert older == newer
    assert "Oslo" in older
    assert "tool: rain" in older


def test_only_the_allowed_tools_are_shown(client: httpx.Client) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in ("one", "two", "three")
    ]

    def asked(status: int = 200, mode: str = "auto", *names: str) -> Any:
        chosen = [{"type": "function", "function": {"name": name}} for name in names]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}}
        return chat(client, status, model="echo", tools=tools, tool_choice=choice, max_tokens=400)

    shown = asked(200, "auto", "one", "three")["message"]["content"]
    assert '"one"' in shown
    assert '"three"' in shown
    assert '"two"' not in shown
    for refused in (asked(400, "auto", "four"), asked(400, "any", "one"), asked(400, "auto")):
        assert refused["error"]["param"] == "tool_choice"


def test_a_message_is_continued(client: httpx.Client) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    plain = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    going_on = client.post(
        "/v1/chat/completions",
        json={"messages": messages, "max_tokens": 1, "continue_final_message": True},
    )
    whole = len("user: hi\nassistant: Well, ")
    assert going_on.json()["usage"]["prompt_tokens"] == whole
    assert plain.json()["usage"]["prompt_tokens"] == whole + len("\nassistant: ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
    ],
)  # fmt: skip
def test_refusals(client: httpx.Client, fields: Any, param: str) -> None:
    assert chat(client, 400, **fields)["error"]["param"] == param
