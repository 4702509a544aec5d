"""Ollama's protocol over a fake worker, and the description of all routes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.server import app
from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HI = [{"role": "user", "content": "hi"}]
CALL = 'Well.<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home: Path = tmp_path_factory.mktemp("home")
    add_model(home, "echo")
    add_model(home, "caller", FakeModel(answer=CALL))
    add_model(home, "dies-late", FakeModel(die_at_token=3))
    with serving(home) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def lines(client: httpx.Client, route: str, **body: Any) -> list[Any]:
    with client.stream("POST", route, json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.iter_lines() if line]


def test_a_chat_streams_unless_told_otherwise(client: httpx.Client) -> None:
    body: Any = {"model": "echo", "messages": HI, "options": {"num_predict": 5}}
    streamed = lines(client, "/api/chat", **body)
    assert "".join(line["message"]["content"] for line in streamed) == "user:"
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    assert streamed[-1]["done_reason"] == "length"
    assert streamed[-1]["eval_count"] == 5
    whole = client.post("/api/chat", json={**body, "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": "user:"}
    assert whole["prompt_eval_count"] == len("user: hi\nassistant: ")


def test_generate(client: httpx.Client) -> None:
    body = {"model": "echo", "prompt": "hi", "system": "s", "options": {"stop": ["\n"]}}
    streamed = lines(client, "/api/generate", **body)
    assert "".join(line["response"] for line in streamed) == "system: s"
    assert streamed[-1]["done_reason"] == "stop"


def test_calls_are_told_whole(client: httpx.Client) -> None:
    streamed = lines(client, "/api/chat", model="caller", messages=HI, tools=TOOLS)
    [call] = [call for line in streamed for call in line["message"].get("tool_calls", [])]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Paris"}}


def test_models(client: httpx.Client) -> None:
    names = [model["name"] for model in client.get("/api/tags").json()["models"]]
    assert names == ["caller", "dies-late", "echo"]
    shown = client.post("/api/show", json={"model": "echo"}).json()
    assert shown["details"]["family"] == "llama"
    assert "tools" in shown["capabilities"]
    assert client.get("/api/version").json()["version"]


def test_refusals_are_one_sentence(client: httpx.Client) -> None:
    missing = client.post("/api/chat", json={"model": "nobody", "messages": HI})
    assert missing.status_code == 404
    assert "nobody" in missing.json()["error"]
    bad = client.post("/api/chat", json={"model": "echo", "messages": HI, "format": {"not": {}}})
    assert bad.status_code == 400
    assert "not" in bad.json()["error"]
    late = lines(client, "/api/chat", model="dies-late", messages=HI)
    assert "error" in late[-1]


def test_every_route_for_clients_is_described(client: httpx.Client) -> None:
    described = client.get("/openapi.json").json()
    routes = {
        (method.lower(), path.replace(":path", ""))
        for method, path, _ in app._ENDPOINTS
        if path.startswith(("/v1/", "/api/"))
    }
    told = {(method, path) for path, methods in described["paths"].items() for method in methods}
    assert routes <= told
    assert "messages" in described["components"]["schemas"]["ChatFields"]["properties"]
