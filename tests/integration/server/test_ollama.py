"""Ollama's protocol over a fake worker, and the description of all routes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.server.routes import ROUTES
from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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
    add_model(home, "slow-load", FakeModel(load_s=0.5))
    with (
        serving(home, server_keepalive_after_s=0.15) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def lines(client: httpx.Client, route: str, **body: Any) -> list[Any]:
    with client.stream("POST", route, json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
        # As their own clients do: a line that is no JSON, be it empty, is an error.
        return [json.loads(line) for line in answer.iter_lines()]


def state(client: httpx.Client, model: str) -> str:
    rows = client.get("/admin/api/models").json()
    return next((str(row["state"]) for row in rows if row["name"] == model), "absent")


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


@pytest.mark.parametrize(
    ("route", "question", "text_of"),
    [
        ("/api/chat", {"messages": HI}, lambda line: line["message"]["content"]),
        ("/api/generate", {"prompt": "hi"}, lambda line: line["response"]),
    ],
)
def test_what_keeps_a_stream_alive_is_a_line_like_others(
    client: httpx.Client, route: str, question: Any, text_of: Callable[[Any], str]
) -> None:
    client.post("/admin/api/models/slow-load/unload").raise_for_status()
    streamed = lines(client, route, model="slow-load", options={"num_predict": 5}, **question)
    assert [text_of(line) for line in streamed[:2]] == ["", ""]
    assert "".join(map(text_of, streamed)) == "user:"
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    assert all(line["created_at"] and line["model"] == "slow-load" for line in streamed)


def test_one_token_takes_time_too(client: httpx.Client) -> None:
    for route, question in (("/api/chat", {"messages": HI}), ("/api/generate", {"prompt": "hi"})):
        body = {"model": "echo", "stream": False, "options": {"num_predict": 1}, **question}
        said = client.post(route, json=body).json()
        assert said["eval_count"] == 1
        assert 0 < said["eval_duration"] <= said["total_duration"]


@pytest.mark.parametrize(
    ("route", "nothing", "says"),
    [
        ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/chat", {}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/generate", {"prompt": ""}, {"response": ""}),
        ("/api/generate", {"system": "s"}, {"response": ""}),
    ],
)
def test_to_ask_nothing_is_to_load_or_unload(
    client: httpx.Client, route: str, nothing: Any, says: Any
) -> None:
    def sent(**fields: object) -> Any:
        answer = client.post(route, json={"model": "echo", **nothing, **fields})
        assert answer.status_code == 200, answer.text
        said = answer.json()
        assert said.pop("created_at")
        return said

    client.post("/admin/api/models/echo/unload").raise_for_status()
    loaded = {"model": "echo", "done": True, "done_reason": "load", **says}
    assert sent() == sent(stream=False, keep_alive="10m") == sent(keep_alive=-1) == loaded
    assert state(client, "echo") == "ready"
    for no_time in (0, "0s"):
        assert sent(keep_alive=no_time) == {**loaded, "done_reason": "unload"}
        assert state(client, "echo") == "absent"
    missing = client.post(route, json={"model": "nobody", **nothing})
    assert missing.status_code == 404


@pytest.mark.parametrize(
    ("route", "wrong", "named"),
    [
        ("/api/chat", {"tools": [0]}, "tools"),
        ("/api/chat", {"format": "{"}, "format"),
        ("/api/generate", {"context": [None]}, "context"),
        ("/api/generate", {"format": "{"}, "format"),
    ],
)
def test_what_is_wrong_is_refused_where_nothing_is_asked_too(
    client: httpx.Client, route: str, wrong: dict[str, object], named: str
) -> None:
    answer = client.post(route, json={"model": "echo", **wrong})
    assert answer.status_code == 400
    assert f"`{named}" in answer.json()["error"]


def test_models(client: httpx.Client) -> None:
    names = [model["name"] for model in client.get("/api/tags").json()["models"]]
    assert names == ["caller", "dies-late", "echo", "slow-load"]
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


def test_every_route_is_described(client: httpx.Client) -> None:
    described = client.get("/openapi.json").json()
    routes = {(route.method.lower(), route.path.replace(":path", "")) for route in ROUTES}
    told = {(method, path) for path, methods in described["paths"].items() for method in methods}
    assert routes == told
    assert "messages" in described["components"]["schemas"]["ChatFields"]["properties"]
