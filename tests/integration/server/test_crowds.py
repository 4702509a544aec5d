"""All places taken by clients that keep the server waiting: others still find one."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest

from penstock.server.http.sessions import MAX_SIGNING_IN
from penstock.testing.fake_server import FakeServer, add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLACES = 12
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
DRIP = b"content-length: 1000\r\n\r\n{"


def post(path: str, key: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n"
    return (head + (f"authorization: Bearer {key}\r\n" if key else "")).encode()


def whole(path: str, body: dict[str, Any], key: str = "") -> bytes:
    content = json.dumps(body).encode()
    return post(path, key) + b"content-length: %d\r\n\r\n" % len(content) + content


@contextmanager
def crowd(server: FakeServer, count: int, said: bytes) -> Iterator[list[socket.socket]]:
    """So many connections that say this, read nothing, and stay."""
    parts = urlsplit(server.url)
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(20)
            sock.connect((parts.hostname, parts.port))
            sock.sendall(said)
        yield sockets


def ask(server: FakeServer, key: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, headers=headers, timeout=60)


def until_answered(server: FakeServer, key: str = "") -> None:
    deadline = time.monotonic() + 20
    while (answer := ask(server, key)).status_code != 200:
        assert answer.status_code == 503
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.1)


def silent(sock: socket.socket) -> bool:
    """Whether the server has neither said anything nor closed the connection."""
    sock.setblocking(False)
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    finally:
        sock.settimeout(20)
    return False


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "fake")
    add_model(home, "long", FakeModel(context=100_000))
    add_model(home, "slow", FakeModel(step_s=0.1, context=100_000))
    return home


def test_bodies_that_do_not_come_make_way(home: Path) -> None:
    drip = post("/v1/chat/completions") + DRIP
    with (
        serving(home, server_max_connections=PLACES) as server,
        crowd(server, PLACES - 3, drip) as slow,
    ):
        until_answered(server)
        assert all(map(silent, slow))  # while there is room nobody has to go
        with crowd(server, PLACES, drip):
            until_answered(server)
            assert slow[0].recv(100).startswith(b"HTTP/1.1 503 ")


def test_streams_that_nobody_reads_make_way(home: Path) -> None:
    body = {"model": "long", "prompt": "hi", "max_tokens": 3000, "stream": True, "logprobs": 20}
    with (
        serving(home, server_max_connections=PLACES) as server,
        crowd(server, PLACES, whole("/v1/completions", body)),
    ):
        until_answered(server)


def test_a_key_has_no_more_than_its_share_when_others_wait(home: Path) -> None:
    """Its requests are at work, all of them whole and read."""
    body = {**CHAT, "model": "slow", "max_tokens": 5000, "ignore_eos": True}
    with (
        serving(home, server_max_connections=PLACES, server_api_keys=["a", "b"]) as server,
        crowd(server, PLACES, whole("/v1/chat/completions", body, "a")) as many,
    ):
        until_answered(server, "b")
        assert sum(map(silent, many)) == PLACES - 1
        assert many[-1].recv(100).startswith(b"HTTP/1.1 503 ")


def test_signing_in_takes_no_places_away(home: Path) -> None:
    begun = time.monotonic()
    with (
        serving(home, server_max_connections=PLACES, server_api_keys=["user"]) as server,
        crowd(server, PLACES, post("/web/session") + DRIP) as slow,
    ):
        signed_in = httpx.post(f"{server.url}/web/session", json={"key": "user"}, timeout=20)
        assert signed_in.status_code == 200
        assert ask(server, "user").status_code == 200
        answers = [sock.recv(100) for sock in slow]
        assert time.monotonic() - begun < 9  # before, a body had ten seconds
    assert sum(b" 503 " in answer for answer in answers) == PLACES - MAX_SIGNING_IN + 1
    assert sum(b" 408 " in answer for answer in answers) == MAX_SIGNING_IN - 1


def test_a_key_is_short(home: Path) -> None:
    with serving(home, server_api_keys=["user"]) as server:
        answer = httpx.post(f"{server.url}/web/session", json={"key": "x" * 5000}, timeout=20)
        assert answer.status_code == 413
