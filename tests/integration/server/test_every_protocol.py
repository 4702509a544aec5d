"""The same two promises on every route that carries a prompt: a refusal comes before the first
byte, in the protocol's own shape, and a stream that fails later ends with its protocol's error.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.server.protocols.anthropic.fields import CountFields, MessagesFields
from penstock.server.protocols.ollama.fields import OllamaChatFields, OllamaGenerateFields
from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Route:
    path: str
    prompt: Callable[[str], Any]  # the fields that carry it
    code: Callable[[Any], str]  # of a refusal, from its body
    failure: Callable[[Any], str]  # of a failed stream, from its last event


def _messages(text: str) -> Any:
    return {"messages": [{"role": "user", "content": text}]}


def _openai(body: Any) -> str:
    assert set(body["error"]) >= {"message", "type", "param", "code"}
    return str(body["error"]["code"])


def _anthropic(body: Any) -> str:
    assert body["type"] == "error"
    assert body["request_id"]
    assert body["error"]["message"]
    return str(body["error"]["type"])


def _ollama(body: Any) -> str:
    assert set(body) == {"error"}
    return str(body["error"])


def _response(event: Any) -> str:
    assert event["type"] == "response.failed"
    assert event["response"]["status"] == "failed"
    return str(event["response"]["error"]["code"])


ROUTES = [
    Route("/v1/chat/completions", _messages, _openai, _openai),
    Route("/v1/completions", lambda text: {"prompt": text}, _openai, _openai),
    Route("/v1/responses", lambda text: {"input": text}, _openai, _response),
    Route(
        "/v1/messages", lambda text: {**_messages(text), "max_tokens": 50}, _anthropic, _anthropic
    ),
    Route("/api/chat", _messages, _ollama, _ollama),
    Route("/api/generate", lambda text: {"prompt": text}, _ollama, _ollama),
]
TOO_LONG = {"_openai": "context_length_exceeded", "_anthropic": "invalid_request_error"}
LOST = {"_anthropic": "overloaded_error"}
each_route = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "small", FakeModel(context=64))
    for number in range(len(ROUTES)):  # one that has died often is not started again at once
        add_model(home, f"dies-late-{number}", FakeModel(die_at_token=3))
    with serving(home) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@each_route
@pytest.mark.parametrize("stream", [False, True])
def test_refused_before_the_first_byte(client: httpx.Client, route: Route, stream: bool) -> None:
    body = {"model": "small", "stream": stream, **route.prompt("x" * 100)}
    answer = client.post(route.path, json=body)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    expected = TOO_LONG.get(route.code.__name__, "64 tokens")
    assert expected in route.code(answer.json())
    unknown = client.post(route.path, json={**body, "model": "nobody"})
    assert unknown.status_code == 404
    route.code(unknown.json())
    broken = client.post(route.path, content=b"{")
    assert broken.status_code == 400
    route.code(broken.json())


@each_route
def test_a_failure_after_the_first_byte_ends_the_stream(client: httpx.Client, route: Route) -> None:
    body = {"model": f"dies-late-{ROUTES.index(route)}", "stream": True, **route.prompt("hello")}
    with client.stream("POST", route.path, json=body) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line and not line.startswith("event:")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert len(events) > 1
    assert "[DONE]" not in lines[-1]
    expected = LOST.get(route.failure.__name__, "worker_restarted")
    said = route.failure(events[-1])
    assert said == expected or (route.failure is _ollama and "dies-late" in said)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/messages", MessagesFields),
        ("/v1/messages/count_tokens", CountFields),
        ("/api/chat", OllamaChatFields),
        ("/api/generate", OllamaGenerateFields),
    ],
)
def test_a_large_body_is_converted_beside_the_event_loop(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, kind: Any
) -> None:
    convert, threads = kind.conversation, []

    def noted(fields: Any) -> Any:
        threads.append(threading.current_thread().name)
        return convert(fields)

    monkeypatch.setattr(kind, "conversation", noted)
    for size in (1, 100_000):
        body = {"model": "small", "max_tokens": 5, "prompt": "x" * size, **_messages("x" * size)}
        client.post(path, json=body)
    # The server of these tests is a thread, whose name this is.
    assert [thread == "fake server" for thread in threads] == [True, False]
