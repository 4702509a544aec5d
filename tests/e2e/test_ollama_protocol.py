"""Ollama's routes over plain HTTP, against `penstock serve` with the real starter model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "SmolLM2-135M-Instruct"
HELLO = [{"role": "user", "content": "Say hello."}]
OPTIONS = {"num_predict": 6, "temperature": 0}
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(real_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real_url, timeout=300) as client:
        yield client


def lines(client: httpx.Client, route: str, **body: Any) -> list[Any]:
    with client.stream("POST", route, json={"model": MODEL, **body}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.iter_lines()]


def ask(client: httpx.Client, route: str, **body: Any) -> Any:
    answer = client.post(route, json={"model": MODEL, "stream": False, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_chat_whole_and_in_lines(client: httpx.Client) -> None:
    whole = ask(client, "/api/chat", messages=HELLO, options=OPTIONS)
    assert whole["model"] == MODEL
    assert whole["message"]["role"] == "assistant"
    assert "hello" in whole["message"]["content"].lower()
    assert whole["done"] is True
    assert whole["eval_count"] == 6
    assert whole["done_reason"] == "length"
    streamed = lines(client, "/api/chat", messages=HELLO, options=OPTIONS)
    assert "".join(line["message"]["content"] for line in streamed) == whole["message"]["content"]
    assert len(streamed) > 2
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    assert streamed[-1]["prompt_eval_count"] == whole["prompt_eval_count"] > 0
    assert streamed[-1]["eval_duration"] > 0


def test_generate_whole_and_in_lines(client: httpx.Client) -> None:
    body: Any = {"prompt": "Say hello.", "options": OPTIONS}
    whole = ask(client, "/api/generate", **body)
    chat = ask(client, "/api/chat", messages=HELLO, options=OPTIONS)
    assert whole["response"] == chat["message"]["content"]
    streamed = lines(client, "/api/generate", **body)
    assert "".join(line["response"] for line in streamed) == whole["response"]
    stop = whole["response"][2:5]
    cut = ask(client, "/api/generate", prompt="Say hello.", options={**OPTIONS, "stop": [stop]})
    assert cut["response"] == whole["response"][:2]
    assert cut["done_reason"] == "stop"


def test_a_given_form(client: httpx.Client) -> None:
    options = {"num_predict": 30, "temperature": 0}
    answer = ask(client, "/api/chat", messages=HELLO, format=COLOUR, options=options)
    assert json.loads(answer["message"]["content"])["colour"] in {"red", "green", "blue"}
    refused = client.post(
        "/api/generate", json={"model": MODEL, "prompt": "x", "format": {"not": {}}}
    )
    assert refused.status_code == 400
    assert isinstance(refused.json()["error"], str)


def test_models(client: httpx.Client) -> None:
    tags = client.get("/api/tags").json()["models"]
    [found] = [model for model in tags if model["name"] == MODEL]
    assert found["size"] > 100_000_000
    shown = client.post("/api/show", json={"model": MODEL}).json()
    assert shown["model_info"]["llama.context_length"] == 8192
    assert "completion" in shown["capabilities"]
    assert "<|im_start|>" in shown["template"]
    missing = client.post("/api/show", json={"model": "nobody"})
    assert missing.status_code == 404
    assert "nobody" in missing.json()["error"]


def test_a_prompt_too_long_is_refused_before_the_first_line(client: httpx.Client) -> None:
    long = client.post("/api/generate", json={"model": MODEL, "prompt": "word " * 9000})
    assert long.status_code == 400
    assert "8192" in long.json()["error"]
