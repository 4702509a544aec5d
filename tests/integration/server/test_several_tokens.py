"""Answers are the same, whether a step gives one token of them or several: on every route, whole
and streamed, to the end and to a stop string, with tools, reasoning and log-probabilities."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CLAUDE_TOOLS = [{"name": "weather", "input_schema": {"type": "object"}}]
BLIND = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
THINKING = "<think>\nWhy not.\n</think>\n\nYes, the word is: wörd. And then it goes on."
HI = [{"role": "user", "content": "hi"}]
AT_ONCE = (1, 2, 3, 7, 64)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home = tmp_path_factory.mktemp("home")
    calls = "So: " + CALL % "Paris" + "\n" + CALL % "Rome"
    for count in AT_ONCE:
        add_model(home, f"caller-{count}", FakeModel(answer=calls, tokens_a_step=count))
        thinker = FakeModel(answer=THINKING, tokens_a_step=count)
        add_model(home, f"thinker-{count}", thinker, BLIND + "{# <think></think> tools #}")
    with serving(home) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("caller", "/v1/chat/completions", {"messages": HI, "tools": TOOLS}),
    ("caller", "/v1/messages", {"messages": HI, "tools": CLAUDE_TOOLS, "max_tokens": 300}),
    ("caller", "/api/chat", {"messages": HI, "tools": TOOLS}),
    ("thinker", "/v1/chat/completions", {"messages": HI}),
    ("thinker", "/v1/chat/completions", {"messages": HI, "stop": ["wör", "goes"]}),
    ("thinker", "/v1/chat/completions", {"messages": HI, "max_tokens": 33}),
    ("thinker", "/v1/chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 2}),
    ("thinker", "/v1/completions", {"prompt": "x", "stop": "is: ", "logprobs": 1, "echo": True}),
    ("thinker", "/v1/completions", {"prompt": ["x", "yz"], "n": 2, "stop_token_ids": [ord(",")]}),
    ("thinker", "/v1/responses", {"input": "x"}),
    ("thinker", "/v1/messages", {"messages": HI, "max_tokens": 99, "stop_sequences": ["And"]}),
    ("thinker", "/api/generate", {"prompt": "x", "options": {"stop": ["on"]}}),
]
each_case = pytest.mark.parametrize(("model", "path", "fields"), CASES)


OWN = {"id", "item_id", "call_id", "model", "created", "created_at", "system_fingerprint"}
TIMES = ("_duration", "_at", "_prediction_tokens", "drafted_tokens")


def neutral(value: Any) -> Any:
    """Without what differs between any two answers: names, times, and how tokens came."""
    if isinstance(value, dict):
        kept = {key for key in value if key not in OWN and not key.endswith(TIMES)}
        return {key: neutral(value[key]) for key in kept}
    if isinstance(value, list):
        return [neutral(each) for each in value]
    return re.sub(r"-\d+$", "", value) if isinstance(value, str) else value


@each_case
def test_a_whole_answer_is_the_same(
    client: httpx.Client, model: str, path: str, fields: dict[str, Any]
) -> None:
    answers = []
    for count in AT_ONCE:
        body = {"model": f"{model}-{count}", "stream": False, **fields}
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        answers.append(neutral(answer.json()))
    for count, answer in zip(AT_ONCE[1:], answers[1:], strict=True):
        assert answer == answers[0], f"{count} tokens at once"


def texts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of an event, with the names that lead to it."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from texts(each, f"{path}.{key}")
    elif isinstance(value, list):
        for each in value:
            yield from texts(each, path)
    else:
        yield path, value


JOINED = re.compile(r"\.(content|reasoning_content|arguments|text|thinking|partial_json|response)$")


@each_case
def test_a_stream_says_the_same(
    client: httpx.Client, model: str, path: str, fields: dict[str, Any]
) -> None:
    said = []
    for count in AT_ONCE:
        body = {"model": f"{model}-{count}", "stream": True, **fields}
        if path.startswith(("/v1/chat", "/v1/completions")):
            body["stream_options"] = {"include_usage": True}
        joined: dict[str, str] = {}
        last: dict[str, Any] = {}
        with client.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if not data.startswith("{"):
                    continue
                event = neutral(json.loads(data))
                choices = event.get("choices") or [{}]
                kind = f"{event.get('type')} {event.get('index')} {choices[0].get('index')}"
                for name, value in texts(event):
                    if JOINED.search(name) and isinstance(value, str):
                        joined[kind + name] = joined.get(kind + name, "") + value
                    elif "usage" in name or name.endswith(("reason", "_count")):
                        last[name] = value or last.get(name)
        assert joined
        said.append((joined, last))
    for count, each in zip(AT_ONCE[1:], said[1:], strict=True):
        assert each == said[0], f"{count} tokens at once"


def test_drafts_are_told_in_usage_metrics_and_rows(client: httpx.Client) -> None:
    body = {"model": "thinker-7", "messages": HI}
    usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    details, tokens = usage["completion_tokens_details"], usage["completion_tokens"]
    assert details["accepted_prediction_tokens"] == tokens - -(-tokens // 7)
    drafted = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert usage["penstock"]["drafted_tokens"] == drafted > 0
    text = client.get("/metrics").text
    found = dict(re.findall(r'(penstock_drafts_\w+_total){model="thinker-7",[^}]*} (\d+)', text))
    assert {float(each) for each in found.values()} and len(found) == 2
    rows = {row["name"]: row for row in client.get("/admin/api/models").json()}
    counts = rows["thinker-7"]["drafts"]["fake"]
    assert counts["accepted"] == float(found["penstock_drafts_accepted_total"])
    assert counts["verified"] == float(found["penstock_drafts_verified_total"])
    assert counts["accepted"] >= details["accepted_prediction_tokens"]


def test_tokens_behind_a_stop_string_are_nobodys(client: httpx.Client) -> None:
    used = []
    for count in AT_ONCE:
        body = {"model": f"thinker-{count}", "messages": HI, "stop": "Yes"}
        answer = client.post("/v1/chat/completions", json=body).json()
        used.append(answer["usage"]["completion_tokens"])
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] <= used[-1]
    assert used == [THINKING.index("Yes") + len("Yes")] * len(AT_ONCE)
