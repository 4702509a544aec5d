"""What waits for a slow client is booked, compact, and the same answer in the end."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from penstock.memory.ledger import Ledger
from penstock.memory.requests import LOGPROB_BYTES, RequestPool
from penstock.server.api.backlog import MERGED_TOKEN_BYTES, PIECE_BYTES, Backlog
from penstock.server.api.generation import Finish, Piece
from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = 5000
LONG = 20_000


def pool() -> RequestPool:
    return RequestPool(Ledger({"ram": 1 << 30}), 1 << 20, 1 << 26, 1.0)


def piece(choice: int, number: int, finish: Finish | None = None) -> Piece:
    return Piece(choice, f"{number},", [number], [number], finish=finish)


def test_pieces_come_one_by_one_while_the_client_keeps_up() -> None:
    async def body() -> None:
        requests = pool()
        backlog = Backlog(requests.share())
        for number in range(3):
            backlog.put(piece(0, number))
        assert [p.text for p in await backlog.take(1)] == ["0,", "1,", "2,"]
        assert requests.used_bytes == 3 * (PIECE_BYTES + MERGED_TOKEN_BYTES)
        backlog.sent()
        assert requests.used_bytes == 0
        assert await backlog.take(0.01) == []
        assert not backlog.ended
        backlog.end()
        assert await backlog.take(1) == []
        assert backlog.ended

    asyncio.run(body())


def test_a_backlog_is_merged_and_loses_nothing() -> None:
    async def body() -> None:
        requests = pool()
        backlog = Backlog(requests.share())
        for number in range(TOKENS):
            last = Finish.LENGTH if number == TOKENS - 1 else None
            for choice in (0, 1):
                backlog.put(piece(choice, number, last))
        assert requests.used_bytes < 2 * TOKENS * (MERGED_TOKEN_BYTES + 32)
        pieces = await backlog.take(1)
        for choice in (0, 1):
            mine = [p for p in pieces if p.choice == choice]
            assert [t for p in mine for t in p.tokens] == list(range(TOKENS))
            assert "".join(p.text for p in mine) == "".join(f"{n}," for n in range(TOKENS))
            assert [p.finish for p in mine if p.finish] == [Finish.LENGTH]
        assert len(pieces) < 2 * TOKENS // 50
        backlog.sent()
        assert requests.used_bytes == 0

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
