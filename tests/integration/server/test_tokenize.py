"""`/tokenize` and `/detokenize` in both peers' words, over a model with one token per byte."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.fake_server import add_model, lengthen_token, serving, watch_bookings
from penstock.testing.fake_worker import FakeModel
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONG = 300


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home: Path = tmp_path_factory.mktemp("home")
    add_model(home, "echo", FakeModel(context=64))
    lengthen_token(add_model(home, "long"), LONG, 4000)
    with (
        serving(home, models_default="echo") as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def ask(client: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text[:1000]
    return answer.json()


def test_as_vllm_has_it(client: httpx.Client) -> None:
    said = ask(client, "/tokenize", model="echo", prompt="abc")
    assert said == {"count": 3, "max_model_len": 64, "tokens": [*b"abc"], "token_strs": None}
    named = ask(client, "/tokenize", prompt="ab", add_special_tokens=False, return_token_strs=True)
    assert named["token_strs"] == ["a", "b"]


def test_a_conversation(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    said = ask(client, "/tokenize", messages=messages)
    assert bytes(said["tokens"]) == b"user: hi\nassistant: "
    bare = ask(client, "/tokenize", messages=messages, add_generation_prompt=False)
    assert bytes(bare["tokens"]) == b"user: hi\n"
    tools = [{"type": "function", "function": {"name": "f"}}]
    shown = ask(client, "/tokenize", messages=messages, tools=tools)
    assert b'"name": "f"' in bytes(shown["tokens"])
    assert shown["count"] > shown["max_model_len"]


def test_as_llama_cpp_has_it(client: httpx.Client) -> None:
    assert ask(client, "/tokenize", content="abc") == {"tokens": [*b"abc"]}
    said = ask(client, "/tokenize", content="aé", with_pieces=True)["tokens"]
    assert said[0] == {"id": 97, "piece": "a"}
    assert [token["piece"] for token in said[1:]] == [[byte] for byte in "é".encode()]
    assert ask(client, "/tokenize", content="a", parse_special=False) == {"tokens": [97]}


def test_a_long_text_is_not_searched_on_the_event_loop(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def noted(_: Tokenizer, text: str) -> bool:
        threads.append(threading.current_thread().name)
        return "b" in text

    monkeypatch.setattr(Tokenizer, "has_special_text", noted)
    for text, status in (("a" * 100_000, 200), ("b" * 100_000, 400)):
        ask(client, "/tokenize", status, content=text, parse_special=False)
    assert all(name.startswith("bodies") for name in threads)
    assert len(threads) == 2


def test_there_and_back(client: httpx.Client) -> None:
    text = "Where is the é?"
    tokens = ask(client, "/tokenize", prompt=text)["tokens"]
    assert ask(client, "/detokenize", tokens=tokens) == {"prompt": text, "content": text}
    assert ask(client, "/detokenize", model="echo", tokens=[]) == {"prompt": "", "content": ""}


@pytest.mark.parametrize("first", [[], list("\U0001f600".encode())], ids=["narrow", "wide"])
def test_what_long_tokens_make_of_a_short_body_is_booked(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, first: list[int]
) -> None:
    booked = watch_bookings(monkeypatch)
    ids = [*first, *[LONG] * 1500]
    text = ask(client, "/detokenize", model="long", tokens=ids)["content"]
    assert text == bytes(first).decode() + "x" * 4000 * 1500
    assert len(text) < max(booked) < 1.1 * len(text)
    content = ask(client, "/tokenize", model="long", content=ids, with_pieces=True)["tokens"]
    assert content[-1] == {"id": LONG, "piece": "x" * 4000}


def test_the_ids_of_a_long_text_are_booked_as_they_come(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when all of them are there."""
    monkeypatch.setattr("penstock.text.tokenizer._SLICE_CHARS", 20_000)
    booked, encode = watch_bookings(monkeypatch), Tokenizer.encode
    before: list[int] = []

    def noted(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        before.append(booked[-1])
        return encode(tokenizer, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    assert ask(client, "/tokenize", prompt="a b " * 50_000)["count"] == 200_000
    assert len(before) > 8
    assert before[-2] - before[0] > 150_000 * 4  # bytes an id


def test_a_text_longer_than_the_window_is_counted(client: httpx.Client) -> None:
    assert ask(client, "/tokenize", prompt="a" * 10_000)["count"] == 10_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "content"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": None}, "tokens"),
        ("/detokenize", {"tokens": [1] * 2_200_000}, "tokens"),
    ],
)
def test_refusals_name_the_field(client: httpx.Client, path: str, body: Any, param: str) -> None:
    assert ask(client, path, 400, **body)["error"]["param"].startswith(param)


def test_an_unknown_model(client: httpx.Client) -> None:
    for path, field in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        ask(client, path, 404, model="nobody", **field)
