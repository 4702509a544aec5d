"""Answers over real sockets and processes with a fake engine that says its prompt again."""

from __future__ import annotations

import json
import re
import socket
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.fake_server import (
    add_model,
    lengthen_token,
    mark_tokens,
    serving,
    watch_bookings,
)
from penstock.testing.fake_worker import FakeModel, lives
from penstock.text.infill import InfillMarks
from penstock.text.stream import StopString
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT = "user: hi\nassistant: "  # what the template makes of them, one token per byte

LONG = 300


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "fake")
    add_model(home, "small", FakeModel(context=64))
    add_model(home, "slow", FakeModel(step_s=0.05))
    lengthen_token(add_model(home, "long"), LONG, 4000)
    mark_tokens(add_model(home, "fills"))
    add_model(home, "dies-once", FakeModel(die_at_token=0, bad_lives=1))
    add_model(home, "dies-late", FakeModel(die_at_token=3))
    add_model(home, "unloadable", FakeModel(load_error_code="model_exceeds_memory"))
    add_model(home, "slow-load", FakeModel(load_s=0.5))
    return home


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[httpx.Client]:
    with (
        serving(home, models_default="fake", server_keepalive_after_s=0.15) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def chat(client: httpx.Client, **fields: Any) -> Any:
    answer = client.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(client: httpx.Client, **fields: Any) -> Any:
    answer = client.post("/v1/completions", json={"prompt": "abc", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(client: httpx.Client, status: int, **fields: Any) -> Any:
    answer = client.post("/v1/completions", json={"prompt": "abc", **fields})
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def stream(client: httpx.Client, route: str = "/v1/completions", **fields: Any) -> list[str]:
    """The lines of a stream, without the empty ones."""
    body = {"prompt": "abc", "messages": MESSAGES, "stream": True, **fields}
    with client.stream("POST", route, json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [line for line in answer.iter_lines() if line]


def events(lines: list[str]) -> list[Any]:
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if line[0] != ":"]


def until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def open_requests(client: httpx.Client, model: str) -> int:
    rows = client.get("/admin/api/models").json()
    return sum(row["leases"] for row in rows if row["name"] == model)


def test_the_default_model_answers_who_names_none(client: httpx.Client) -> None:
    answer = chat(client, max_tokens=4)
    assert answer["model"] == "fake"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": PROMPT[:4], "refusal": None}
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 4,
        "total_tokens": len(PROMPT) + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
        "penstock": {"max_tokens": 4, "drafted_tokens": 0},
    }


def test_the_newer_name_of_max_tokens_wins(client: httpx.Client) -> None:
    answer = chat(client, max_tokens=9, max_completion_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("max_tokens", [None, 10_000, 2**63 - 1])
def test_max_tokens_is_cut_to_the_room(client: httpx.Client, max_tokens: int | None) -> None:
    answer = chat(client, model="small", max_tokens=max_tokens)
    assert answer["usage"]["total_tokens"] == 64
    assert answer["usage"]["penstock"]["max_tokens"] == 64 - len(PROMPT)
    assert answer["choices"][0]["finish_reason"] == "length"


def test_or_refused_where_that_is_the_policy(home: Path) -> None:
    with (
        serving(home, server_max_tokens_policy="refuse") as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        error = refusal(client, 400, model="small", max_tokens=62)
        assert error["param"] == "max_tokens"
        assert complete(client, model="small", max_tokens=61)["usage"]["completion_tokens"] == 61


def test_a_prompt_that_never_fits_is_refused_with_numbers(client: httpx.Client) -> None:
    error = refusal(client, 400, model="small", prompt="x" * 64)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert error["penstock"]["reason"] == "window"
    assert error["penstock"]["needed_tokens"] == 65
    assert error["penstock"]["limit_tokens"] == 64
    assert complete(client, model="small", prompt="x" * 63)["usage"]["completion_tokens"] == 1


def test_parts_of_text_are_joined(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = chat(client, messages=[{"role": "developer", "content": parts}], max_tokens=11)
    assert answer["choices"][0]["message"]["content"] == "system: a\nb"


def test_tools_reach_the_template_unless_the_choice_is_none(client: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    shown = chat(client, tools=tools)["usage"]["prompt_tokens"]
    hidden = chat(client, tools=tools, tool_choice="none")["usage"]["prompt_tokens"]
    assert hidden == len(PROMPT) < shown


def test_a_stream_and_its_usage(client: httpx.Client) -> None:
    lines = stream(
        client, "/v1/chat/completions", max_tokens=3, stream_options={"include_usage": True}
    )
    chunks = events(lines)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == PROMPT[:3]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert "usage" not in events(stream(client, max_tokens=3))[0]


def test_prompts_times_n_are_numbered_in_order(client: httpx.Client) -> None:
    prompts: list[list[Any]] = [["ab", "cd"], [[97, 98], [99, 100]]]
    for prompt in prompts:
        answer = complete(client, prompt=prompt, n=2, max_tokens=2)
        texts = [(choice["index"], choice["text"]) for choice in answer["choices"]]
        assert texts == [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")]
        assert answer["usage"]["completion_tokens"] == 8


def test_a_stop_string_ends_the_answer_and_is_left_out(client: httpx.Client) -> None:
    answer = complete(client, prompt="hello world", stop=["wor"], max_tokens=50)
    assert answer["choices"][0]["text"] == "hello "
    assert answer["choices"][0]["finish_reason"] == "stop"
    until(lambda: open_requests(client, "fake") == 0)
    chunks = events(stream(client, prompt="hello world", stop="wor", max_tokens=50))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello "


def test_a_stop_token_ends_the_answer_and_is_left_out(client: httpx.Client) -> None:
    answer = complete(client, prompt="abcd", stop_token_ids=[ord("c")], max_tokens=9, logprobs=0)
    [choice] = answer["choices"]
    assert choice["text"] == "ab"
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert answer["usage"]["completion_tokens"] == 3


def test_all_answers_to_a_request_share_one_table_of_a_stop_string(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make = StopString.of

    def noted(text: str) -> StopString:
        made.append(text)
        return make(text)

    monkeypatch.setattr(StopString, "of", noted)
    answer = complete(client, prompt=["a wor", "b wor"], n=2, stop=["wor", "word"], max_tokens=50)
    assert [choice["text"] for choice in answer["choices"]] == ["a ", "a ", "b ", "b "]
    assert made == ["wor", "word"]


def test_echo_with_logprobs(client: httpx.Client) -> None:
    [choice] = complete(client, echo=True, logprobs=2, max_tokens=2)["choices"]
    assert choice["text"] == "abcab"
    assert choice["logprobs"]["tokens"] == list("abcab")
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][1] == {"b": -0.5, "c": -1.5}
    [scored] = complete(client, echo=True, logprobs=0, max_tokens=0)["choices"]
    assert scored["text"] == "abc"
    assert scored["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    streamed = events(stream(client, echo=True, logprobs=0, max_tokens=2))
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "abcab"
    names = [name for chunk in streamed for name in chunk["choices"][0]["logprobs"]["tokens"]]
    assert names == list("abcab")


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_prompt_that_is_repeated_in_many_answers_is_booked_for_each(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    booked = watch_bookings(monkeypatch)
    body: dict[str, Any] = {"model": "long", "prompt": [LONG] * 60, "echo": True, "n": 8}
    body["max_tokens"] = 1
    if streams:
        texts = [""] * 8
        for chunk in events(stream(client, **body)):
            [choice] = chunk["choices"]
            texts[choice["index"]] += choice["text"]
    else:
        texts = [choice["text"] for choice in complete(client, **body)["choices"]]
    assert {text[: 60 * 4000] for text in texts} == {"x" * 60 * 4000}
    assert max(booked) > 2 * 8 * 60 * 4000


def test_an_echo_of_more_than_the_window_is_never_made(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "token", lambda *_, **__: pytest.fail("decoded"))
    for prompt in ([LONG] * 65, "x" * 65):
        fields = {"model": "small", "prompt": prompt, "echo": True, "n": 8, "max_tokens": 1}
        answer = client.post("/v1/completions", json=fields)
        assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text[:500]


def test_a_suffix_of_more_than_the_window_is_never_put_to_any_prompt(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InfillMarks, "prompt", lambda *_: pytest.fail("joined"))
    fields = {"model": "fills", "prompt": ["x"] * 100, "suffix": "y" * 500_000}
    answer = client.post("/v1/completions", json=fields)
    assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text[:500]


def test_logprobs_of_a_chat(client: httpx.Client) -> None:
    [choice] = chat(client, logprobs=True, top_logprobs=2, max_tokens=2)["choices"]
    first = choice["logprobs"]["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == ("u", -0.5, [ord("u")])
    assert [other["token"] for other in first["top_logprobs"]] == ["u", "v"]
    assert len(choice["logprobs"]["content"]) == 2


def test_part_of_a_character_is_named_by_its_bytes(client: httpx.Client) -> None:
    [choice] = complete(client, prompt="é", logprobs=0, max_tokens=2)["choices"]
    assert choice["text"] == "é"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]


def test_a_silent_stream_says_that_it_lives(client: httpx.Client) -> None:
    lines = stream(client, model="slow-load", max_tokens=1)
    assert lines[0] == ": keep-alive"
    assert events(lines)[-1]["choices"][0]["finish_reason"] == "length"


def test_a_worker_lost_before_the_first_byte_is_replaced_unseen(
    client: httpx.Client, home: Path
) -> None:
    assert complete(client, model="dies-once", max_tokens=2)["choices"][0]["text"] == "ab"
    assert lives(home / "models" / "dies-once") == 2


def test_a_worker_lost_later_is_an_error_event(client: httpx.Client) -> None:
    lines = stream(client, model="dies-late", max_tokens=9)
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["error"]["code"] == "worker_restarted"
    said = [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if line[0] != ":"]
    assert "".join(chunk["choices"][0]["text"] for chunk in said) == "abc"


def test_a_model_that_cannot_be_loaded_says_not_to_retry(client: httpx.Client) -> None:
    for streaming in (False, True):
        body = {"model": "unloadable", "prompt": "x", "stream": streaming}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 507
        assert answer.json()["error"]["code"] == "model_exceeds_memory"
        assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("streaming", [False, True])
def test_who_leaves_cancels(client: httpx.Client, streaming: bool) -> None:
    body = json.dumps(
        {"model": "slow", "prompt": "abc", "max_tokens": 4000, "stream": streaming}
    ).encode()
    address = (client.base_url.host, client.base_url.port or 80)
    with socket.create_connection(address) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body
        )
        until(lambda: open_requests(client, "slow") == 1)
    until(lambda: open_requests(client, "slow") == 0)


def test_ready_and_metrics(client: httpx.Client) -> None:
    complete(client)
    until(lambda: client.get("/ready").status_code == 200)
    text = client.get("/metrics").text
    assert 'penstock_requests_total{route="/v1/completions",status="200"}' in text
    assert 'penstock_completion_tokens_total{model="fake"}' in text
    assert re.search(r'penstock_kv_capacity_bytes\{model="fake"\} [1-9]', text)


def test_models(client: httpx.Client) -> None:
    names = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert "fake" in names
    complete(client, model="small")
    assert client.get("/v1/models/small").json()["context_now"] == 64
    missing = client.get("/v1/models/nobody")
    assert missing.status_code == 404
    assert "fake" in missing.json()["error"]["message"]
