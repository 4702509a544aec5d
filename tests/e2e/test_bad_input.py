"""Malformed and extreme bodies: each a 4xx in OpenAI's shape that names the field; nobody dies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL = "fake"
HUGE = 10**30


class Bad(NamedTuple):
    """One body and what the refusal must name: a parameter, or None for the whole body."""

    route: str
    body: bytes
    param: str | None

    @property
    def id(self) -> str:
        shown = self.body if len(self.body) < 60 else self.body[:40] + b"..." + self.body[-15:]
        text = shown.decode("ascii", "backslashreplace").replace("\x00", "\\0")
        return f"{self.route[4:8]}-{self.param}-{text}"


def _chat(**fields: Any) -> bytes:
    return json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    ).encode()


def _completions(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hi", **fields}).encode()


def _message(**fields: Any) -> bytes:
    return _chat(messages=[{"role": "user", "content": "hi", **fields}])


# Wrong for both routes: (field, values).
_BOTH: list[tuple[str, list[Any]]] = [
    ("model", [1, [], {}, True]),
    ("stream", ["yes", 1, [], {}]),
    ("stream_options", ["x", 1, [], {"include_usage": True}]),  # the last: without stream
    ("max_tokens", [0, -2, -1.5, -HUGE, HUGE, 1.5, "5", [], {}, True]),
    ("n", [0, -1, 129, HUGE, 1.5, "1", [], True]),
    ("seed", [1.5, "1", [], HUGE, -HUGE, True]),
    ("stop", [1, [1], [""], ["x"] * 17, ["x" * 5000], {}, [None], [["x"]], True]),
    ("temperature", [-0.1, 2.1, HUGE, "1", [], {}, True]),
    ("top_p", [-0.1, 1.1, HUGE, "1", [], True]),
    ("presence_penalty", [-2.1, 2.1, "x", [], HUGE]),
    ("frequency_penalty", [-2.1, 2.1, "x", {}, -HUGE]),
    ("repetition_penalty", [0, -1, 1000, "x", []]),
    ("top_k", [-2, 1.5, "x", HUGE, []]),
    ("min_p", [-0.1, 1.1, "x"]),
    ("min_tokens", [-1, 1.5, "x", HUGE]),
    ("ignore_eos", ["x", 1, []]),
    ("skip_special_tokens", ["x", 1]),
    ("priority", [2**40, "x", 1.5]),
    ("stop_token_ids", [1, "x", [-1], [HUGE], ["x"], [1.5], [[1]], {}, [*range(257)]]),
    ("allowed_token_ids", [1, "x", [], [-1], [HUGE], ["x"], {}, [*range(1025)], [1] * 20_000]),
    (
        "logit_bias",
        [
            1,
            "x",
            [["a", 1]],
            [[1, True]],
            [[1]],
            [[1, 101]],
            {"a": 1},
            {"-1": 1},
            {"99999999": 1},
            {"1": "x"},
            {"1": 101},
            {"1": -101},
            {"1": None},
            {"9" * 5000: 1},
            {" 1": 1},
            {"1_0": 1},
            {"٣": 1},
            {"": 1},
            {str(token): 1 for token in range(1025)},
            {str(token): 1 for token in range(49_152)},
        ],
    ),
    ("functions", [[{"name": "f"}]]),
    ("function_call", ["f", {"name": "f"}]),
    ("bad_words", [["a"]]),
    ("prompt_logprobs", [1]),
    ("truncate_prompt_tokens", [8, -1]),
    ("return_token_ids", [True]),
    ("use_beam_search", [True]),
    ("length_penalty", [1.5]),
    ("include_stop_str_in_output", [True]),
    ("cache_salt", ["x"]),
    ("mirostat", [2]),
    ("typical_p", [0.9]),
    ("dry_multiplier", [0.8]),
    ("xtc_probability", [0.5]),
    ("repeat_penalty", [0, "x", []]),
    ("repeat_last_n", [-2, 1.5, "x", HUGE]),
    ("add_special_tokens", ["x", 1]),
    ("n_indent", [4]),
    ("lora_path", ["x"]),
    ("min_new_tokens", [-1, 1.5, "x"]),
    ("num_beams", [4]),
    ("typ_p", [0.9]),
    ("n_predict", [-2, 1.5, "x", HUGE]),
    ("response_format", ["json", {"type": "json_schema"}, {"type": "x"}]),
]
_CHAT_ONLY: list[tuple[str, list[Any]]] = [
    ("messages", [None, [], "hi", 1, {}, True]),
    ("max_completion_tokens", [0, -2, 1.5, "x", HUGE]),
    ("logprobs", ["x", 1, [], 5]),
    ("top_logprobs", [-1, 21, 1.5, "x", 3]),  # the last: without logprobs
    ("tools", ["x", {}, [1], [{"type": "function"}], [{"type": "x", "function": {"name": "f"}}]]),
    ("tool_choice", ["required", {"type": "function", "function": {"name": "f"}}, "x"]),
    ("modalities", [["audio"], "text", [1]]),
    ("chat_template_kwargs", [1, "x", [], {"messages": []}, {"tools": 1}]),
    ("add_generation_prompt", [1, "x"]),
    ("include_reasoning", ["x", 1]),
    ("enable_thinking", ["x", 1]),
    ("thinking", ["x", 1, []]),
    ("reasoning", ["x", 1, []]),
    ("reasoning_budget", [-2, 1.5, "x"]),
    ("thinking_token_budget", [-2, 1.5, "x"]),
    ("documents", [1, "x", [1], {}]),
    ("echo", [True]),
    ("best_of", [2]),
]
_COMPLETIONS_ONLY: list[tuple[str, list[Any]]] = [
    (
        "prompt",
        [None, "", [], 1, {}, True, [[]], [""], ["a", 1], [1, "a"], [1, [1]], [-1], [HUGE],
         [99999999], [[99999999]], [[-1]], [1.5], [[1.5]], [[["a"]]], [None], [True],
         ["x"] * 1025],
    ),
    ("echo", ["x", 1]),
    ("logprobs", [-1, 21, 1.5, "x", True]),
    ("suffix", ["end", 1, []]),
    ("best_of", [2, 0, "x", 1.5]),
]  # fmt: skip
_NAMED_INSIDE: list[tuple[bytes, str]] = [
    (_message(role="alien"), "messages[0].role"),
    (_message(role=""), "messages[0].role"),
    (_message(role=None), "messages[0].role"),
    (_message(role=1), "messages[0].role"),
    (_message(content=1), "messages[0].content"),
    (_message(content={}), "messages[0].content"),
    (_message(content=["hi"]), "messages[0].content[0]"),
    (_message(content=[{"type": "text"}]), "messages[0].content[0]"),
    (_message(content=[{"type": "text", "text": 1}]), "messages[0].content[0].text"),
    (_message(content=[{"type": "smell"}]), "messages[0].content[0].type"),
    (_message(content=[{"text": "hi"}]), "messages[0].content[0]"),
    (_message(content=[{"type": "image_url", "image_url": {}}]), "messages[0].content[0]"),
    (_message(content=[{"type": "input_audio"}]), "messages[0].content[0]"),
    (_message(name=1), "messages[0].name"),
    (_message(tool_calls="x"), "messages[0].tool_calls"),
    (_message(tool_calls=[{}]), "messages[0].tool_calls[0]"),
    (_message(tool_calls=[{"function": {}}]), "messages[0].tool_calls[0].function"),
    (_chat(messages=[1]), "messages[0]"),
    (_chat(messages=[None]), "messages[0]"),
    (_chat(messages=[{}]), "messages[0]"),
    (_chat(messages=[[]]), "messages[0]"),
    (_chat(messages=[{"content": "hi"}]), "messages[0]"),
    (_chat(messages=[{"role": "user"}]), "messages[0].content"),
    (_chat(messages=[{"role": "assistant"}]), "messages[0].content"),
]
_DEEP = 100_000
# Not JSON, or JSON that no body may be.
_BROKEN: list[bytes] = [
    b"",
    b" ",
    b"\x00",
    b"{",
    b"}",
    b"[]",
    b"1",
    b"null",
    b'"text"',
    b"true",
    b"hello",
    b"{'model': 'fake'}",
    b'{"model": "fake",}',
    b'{"model": "fake"} trailing',
    b'{"model": "fake"}{"model": "fake"}',
    b'{"model": NaN}',
    b'{"temperature": Infinity}',
    b'{"model": "\xff"}',
    b'{"model": "\xed\xa0\x80"}',
    b"\xef\xbb\xbf{}",
    b'{"model": "a\nb"}',
    b'{"model": "\\x"}',
    b'{"model": "\\u12"}',
    b'{"model": "\\ud800"}',
    b'{"model": "\\udc00"}',
    b'{"model": "\\ud800\\ud800"}',
    b'{"model": "\\ud800 and text behind it, long enough"}',
    b'{"x": 01}',
    b'{"x": +1}',
    b'{"x": 1.}',
    b'{"x": .5}',
    b'{"x": --1}',
    b'{"x": ' + b"[" * _DEEP,
    b'{"x": ' + b"[" * _DEEP + b"]" * _DEEP + b"}",
    b'{"x": ' + b'{"a":' * _DEEP + b"1" + b"}" * _DEEP + b"}",
    b"[" * _DEEP + b"]" * _DEEP,
    b"\x1f\x8b\x08\x00compressed",
    "﻿{}".encode("utf-16"),
    b"<xml/>",
    b"model=fake&prompt=hi",
]
_EXTREME: list[Bad] = [
    Bad(CHAT, _message(content="x" * 10_000_000), "messages"),
    Bad(COMPLETIONS, _completions(prompt="x" * 10_000_000), "prompt"),
    Bad(COMPLETIONS, _completions(prompt=[1] * 1_000_000), "prompt"),
    Bad(COMPLETIONS, _completions(prompt=[[1] * 500_000] * 2), "prompt"),
    Bad(CHAT, _chat(messages=[{"role": "user", "content": "hi"}] * 20_000), "messages"),
    Bad(CHAT, _chat(model="x" * 1_000_000), "model"),
    Bad(CHAT, _chat(model="../../etc/passwd"), "model"),
    Bad(CHAT, _chat(model="nobody"), "model"),
    Bad(CHAT, _chat(model="a\x00b"), "model"),
    Bad(CHAT, b'{"messages": [{"role": "user", "content": "hi"}]}', "model"),
    Bad(CHAT, b'{"model": "fake", "temperature": 1e400, "messages": []}', "temperature"),
    Bad(CHAT, b'{"model": "fake", "n": ' + b"9" * 5000 + b', "messages": []}', "n"),
    Bad(CHAT, b'{"model": "fake", "seed": 1e400, "messages": []}', "seed"),
    Bad(CHAT, b'{"model": "fake", "messages": [{"role": "user", "content": "\\ud83d"}]}', None),
    Bad(CHAT, _chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {
        "deep": json.loads("[" * 500 + "]" * 500)}}}]), "tools"),
    Bad(CHAT, _chat(chat_template_kwargs={f"k{i}": i for i in range(100_000)}),
        "chat_template_kwargs"),
    Bad(CHAT, _chat(add_generation_prompt=True, continue_final_message=True),
        "add_generation_prompt"),
    Bad(CHAT, _chat(guided_choice=[f"choice {i}" for i in range(1025)]), "guided_choice"),
    Bad(CHAT, _chat(tool_choice={f"k{i}": i for i in range(100_000)}), "tool_choice"),
    Bad(CHAT, _message(role="x" * 1_000_000), "messages[0].role"),
    Bad(COMPLETIONS, _completions(prompt=[[]] * 1025), "prompt"),
    Bad(CHAT, _chat(chat_template_kwargs={"deep": json.loads("[" * 500 + "]" * 500)}),
        "chat_template_kwargs"),
]  # fmt: skip


def bad_bodies() -> list[Bad]:
    """The whole table."""
    table = [
        Bad(route, make(**{field: value}), field)
        for route, make in ((CHAT, _chat), (COMPLETIONS, _completions))
        for field, values in _BOTH
        for value in values
    ]
    for route, make, fields in (
        (CHAT, _chat, _CHAT_ONLY),
        (COMPLETIONS, _completions, _COMPLETIONS_ONLY),
    ):
        table += [
            Bad(route, make(**{field: value}), field)
            for field, values in fields
            for value in values
        ]
    table += [Bad(CHAT, body, param) for body, param in _NAMED_INSIDE]
    table += [Bad(CHAT, body, None) for body in _BROKEN]
    table += [Bad(COMPLETIONS, body, None) for body in _BROKEN[:12]]
    return table + _EXTREME


TABLE = bad_bodies()


@pytest.fixture(scope="module")
def client(fake_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fake_url, timeout=60) as client:
        yield client


def test_there_are_enough() -> None:
    assert len({(bad.route, bad.body) for bad in TABLE}) >= 200


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: bad.id)
def test_is_refused_by_name(client: httpx.Client, bad: Bad) -> None:
    answer = client.post(bad.route, content=bad.body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["message"].endswith(".")
    assert len(error["message"]) < 1000
    assert error["code"]
    assert answer.headers["x-request-id"]
    if bad.param is None:
        assert error["param"] is None or error["param"] in {"messages", "prompt"}
    else:
        assert (error["param"] or "").startswith(bad.param), error


def test_nobody_died(client: httpx.Client) -> None:
    body = {"model": "fake", "prompt": "alive", "max_tokens": 5}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "alive"
    assert client.get("/ready").status_code == 200
