"""What waits for a slow client is booked, compact, and the same answer in the end."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import TYPE_CHECKING
from unittest import mock
from urllib.parse import urlsplit

import httpx
import pytest

from penstock.errors import Overloaded
from penstock.memory.clients.requests import LOGPROB_BYTES, RequestPool
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger
from penstock.server.pipeline.backlog import (
    BOOKED_BYTES,
    MERGED_TOKEN_BYTES,
    PIECE_BYTES,
    Backlog,
    Backlogs,
)
from penstock.server.pipeline.pieces import FinishReason, Piece
from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel
from penstock.wire import Candidate, TokenLogprobs

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = 5000
LONG = 20_000
MIB = 1 << 20


def pool() -> RequestPool:
    return RequestPool(Ledger({RAM: 1 << 30}), 1 << 20, 1 << 26, 1.0)


def piece(choice: int, number: int, finish: FinishReason | None = None) -> Piece:
    return Piece(choice, f"{number},", [number], [number], finish=finish)


def test_pieces_come_one_by_one_while_the_client_keeps_up() -> None:
    async def body() -> None:
        requests = pool()
        backlog = Backlog(requests.request_memory(), Backlogs(1 << 30))
        for number in range(3):
            backlog.put(piece(0, number))
        assert [p.text for p in await backlog.take(1)] == ["0,", "1,", "2,"]
        held = 3 * (PIECE_BYTES + MERGED_TOKEN_BYTES)
        assert held <= requests.used_bytes <= held + BOOKED_BYTES
        backlog.sent()
        assert requests.used_bytes <= 2 * BOOKED_BYTES
        assert await backlog.take(0.01) == []
        assert not backlog.ended
        backlog.end()
        assert await backlog.take(1) == []
        assert backlog.ended
        backlog.sent()
        assert requests.used_bytes == 0

    asyncio.run(body())


def test_a_client_that_keeps_up_changes_no_books_and_takes_one_timer() -> None:
    async def body() -> None:
        loop, memory = asyncio.get_running_loop(), pool().request_memory()
        backlog = Backlog(memory, Backlogs(1 << 30))
        sizes = set()
        with mock.patch.object(loop, "call_at", wraps=loop.call_at) as call_at:
            for number in range(100):
                loop.call_soon(backlog.put, piece(0, number))
                assert [p.tokens for p in await backlog.take(10)] == [[number]]
                backlog.sent()
                sizes.add(memory.size)
        assert len(sizes) == 1
        assert call_at.call_count == 1
        backlog.end()

    asyncio.run(body())


def test_a_backlog_is_merged_and_loses_nothing() -> None:
    async def body() -> None:
        requests = pool()
        backlog = Backlog(requests.request_memory(), Backlogs(1 << 30))
        for number in range(TOKENS):
            last = FinishReason.LENGTH if number == TOKENS - 1 else None
            for choice in (0, 1):
                backlog.put(piece(choice, number, last))
        assert requests.used_bytes < 2 * TOKENS * (MERGED_TOKEN_BYTES + 32)
        backlog.end()
        pieces = []
        while not backlog.ended:
            pieces += await backlog.take(1)
            assert requests.used_bytes - backlog.held_bytes < 100_000  # on its way
            backlog.sent()
        for choice in (0, 1):
            mine = [p for p in pieces if p.choice == choice]
            assert [t for p in mine for t in p.tokens] == list(range(TOKENS))
            assert "".join(p.text for p in mine) == "".join(f"{n}," for n in range(TOKENS))
            assert [p.finish for p in mine if p.finish] == [FinishReason.LENGTH]
        assert len(pieces) < 2 * TOKENS // 50
        assert requests.used_bytes == 0

    asyncio.run(body())


def heavy(number: int) -> Piece:
    """A token with twenty alternatives, which takes 13 kB."""
    known = TokenLogprobs(Candidate(1, -1.0), [Candidate(2, -2.0)] * 20)
    return Piece(0, f"{number},", [number], [number], logprobs=[known])


def test_the_stream_that_is_furthest_behind_is_ended_when_all_are_too_much() -> None:
    async def body() -> None:
        requests = pool()
        every = Backlogs(4 << 20)
        with (
            every.open(requests.request_memory("one")) as mine,
            every.open(requests.request_memory("other")) as small,
            every.open(requests.request_memory("other")) as large,
        ):
            mine.put(heavy(0))
            for number in range(30):
                small.put(heavy(number))
                large.put(heavy(number))
            await large.take(1)
            sending = requests.used_bytes - every.used_bytes
            assert sending < 100_000
            with pytest.raises(Overloaded, match=r"too far behind .* \d+ bytes .*memory\.limit"):
                for number in range(1000):
                    large.put(heavy(number))
            assert every.used_bytes < every.max_bytes
            assert requests.used_bytes == every.used_bytes + sending
            with pytest.raises(Overloaded):
                await large.take(1)
            assert await small.take(1)
            assert await mine.take(1)
        assert every.used_bytes == 0

    asyncio.run(body())


def test_a_client_that_never_reads_is_booked_and_let_go(tmp_path: Path) -> None:
    add_model(tmp_path, "fake", FakeModel(context=100_000))
    # With alternatives, so that what the sockets take between them is soon full.
    body = {"model": "fake", "prompt": "hi", "max_tokens": LONG, "stream": True, "logprobs": 20}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}"
    with serving(tmp_path, server_slow_client_s=1.5) as server:
        parts = urlsplit(server.url)
        with socket.socket() as lazy, httpx.Client(base_url=server.url, timeout=60) as client:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.connect((parts.hostname, parts.port))
            lazy.sendall(head.encode() + b"\r\n\r\n" + content)
            used: list[int] = []
            deadline = time.monotonic() + 60
            while not used or used[-1] or max(used) < 1 << 20:
                assert time.monotonic() < deadline, max(used)
                used.append(client.get("/admin/api/memory").json()["requests"]["used_bytes"])
                time.sleep(0.02)
            # Much of the answer had to wait here, and none of it is held now.
            assert max(used) <= LONG * (PIECE_BYTES + 21 * LOGPROB_BYTES)
            answer = client.post("/v1/completions", json={**body, "stream": False, "max_tokens": 3})
            assert answer.status_code == 200


def test_a_client_that_reads_too_late_is_told_so(tmp_path: Path) -> None:
    add_model(tmp_path, "fake", FakeModel(context=100_000, step_s=0.001))
    body = {"model": "fake", "prompt": "hi", "max_tokens": LONG, "stream": True, "logprobs": 20}
    small = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)])
    limits = {"memory_limit": "8GiB", "server_max_bodies": 2 << 20}  # 2.5 MiB for streams
    with (
        serving(tmp_path, **limits) as server,
        httpx.Client(base_url=server.url, timeout=60, transport=small) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        made, before = 0, -1
        while not made or made != before:  # it goes on although nobody reads
            time.sleep(0.3)
            [row] = httpx.get(f"{server.url}/admin/api/requests").json()
            before, made = made, row["completion_tokens"]
        assert httpx.get(f"{server.url}/admin/api/memory").json()["requests"]["used_bytes"] < MIB
        events = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert "too far behind" in json.loads(events[-1][6:])["error"]["message"]
