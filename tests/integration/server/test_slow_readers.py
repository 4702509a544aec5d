"""Answers that are read slowly: a least rate over the whole, and less patience when others wait."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from penstock.memory.clients import waits
from penstock.testing.fake_server import FakeServer, add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

TOKENS = 4000
MIB = 1 << 20
# An answer of 8 MB, more than sockets hold, for which 52 MB are booked.
LONG = {"model": "fake", "prompt": "hi", "max_tokens": TOKENS, "logprobs": 20}


def used(server: FakeServer) -> int:
    row = httpx.get(f"{server.url}/admin/api/memory", timeout=30).json()["requests"]
    return int(row["used_bytes"])


@contextlib.contextmanager
def reader(server: FakeServer, every_s: float) -> Iterator[threading.Event]:
    """Asks for the answer and reads 16 KiB of it now and then; the event is set when it ends."""
    content, over, stop = json.dumps(LONG).encode(), threading.Event(), threading.Event()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}"

    def read(sock: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            while not stop.wait(every_s) and sock.recv(16 << 10):
                pass
        over.set()

    parts = urlsplit(server.url)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(60)
        sock.connect((parts.hostname, parts.port))
        sock.sendall(head.encode() + b"\r\n\r\n" + content)
        thread = threading.Thread(target=read, args=(sock,))
        thread.start()
        try:
            yield over
        finally:
            stop.set()
            thread.join()


def test_an_answer_has_a_least_rate_over_the_whole(tmp_path: Path) -> None:
    add_model(tmp_path, "fake", FakeModel(context=100_000))
    limits = {"server_slow_client_s": 2, "server_answer_rate": 16 * MIB}
    with serving(tmp_path, **limits) as server, reader(server, every_s=0.2) as over:
        assert over.wait(60), "whoever takes a piece just in time holds it for ever"
        assert used(server) < MIB


def test_a_slow_reader_ends_when_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "_SLOW_S", 1.0)
    add_model(tmp_path, "fake", FakeModel(context=100_000))
    limits = {"memory_limit": "8GiB", "server_max_bodies": 11 * MIB}  # 55 MiB for requests
    with serving(tmp_path, **limits) as server, reader(server, every_s=0.2) as over:
        deadline = time.monotonic() + 60
        while used(server) < 45 * MIB:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        begun = time.monotonic()
        body = json.dumps({**LONG, "max_tokens": 3}).encode().ljust(4 * MIB)
        answer = httpx.post(f"{server.url}/v1/completions", content=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert time.monotonic() - begun < 30
        assert over.wait(30)
        events = httpx.get(f"{server.url}/admin/api/events", timeout=30).json()
        [row] = [row for row in events if row["event"] == "slow client ended"]
        assert row["held_bytes"] > 40 * MIB
        assert row["waited_s"] >= 1
