"""Heads of requests: how long and how late, over real sockets and uvicorn itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn

from penstock.server import connection
from penstock.server.connection import MOST_HEAD_BYTES, Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Says how long the body was, after a while."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    await asyncio.sleep(0.4)
    said = str(size).encode()
    headers = [(b"content-length", str(len(said)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": said})


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    config = uvicorn.Config(app, http=Connection, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        serving = asyncio.create_task(server.serve([sock]))
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        yield reader, writer
        writer.close()
        server.should_exit = True
        await serving


async def send_until_closed(writer: asyncio.StreamWriter, piece: bytes, most: int) -> int:
    """How much could be sent."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most and not writer.is_closing():
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
            await asyncio.sleep(0)
    return sent


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (HEAD, b"a:b\r\n" * 2000),
        (HEAD + b"a: ", b"b" * 10_000),
        (b"GET /", b"a" * 10_000),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"a:b\r\n" * 2000),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\na: ", b"b" * 10_000),
    ],
    ids=["many headers", "one header", "address", "many trailers", "one trailer"],
)
def test_a_head_without_end_is_refused(begin: bytes, piece: bytes) -> None:
    async def run() -> None:
        async with connected() as (reader, writer):
            writer.write(begin)
            sent = await send_until_closed(writer, piece, 64 << 20)
            assert sent < 32 * MOST_HEAD_BYTES  # what sockets themselves hold
            with contextlib.suppress(ConnectionError):  # a reset may overtake the answer
                answer = await reader.read()
                assert not answer or answer.startswith(b"HTTP/1.1 431 ")

    asyncio.run(run())


def test_a_long_head_is_told_so() -> None:
    async def run() -> None:
        async with connected() as (reader, writer):
            writer.write(HEAD + b"a: " + b"b" * MOST_HEAD_BYTES + b"\r\n\r\n")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 431 ")
            assert str(MOST_HEAD_BYTES).encode() in answer

    asyncio.run(run())


@pytest.mark.parametrize("begin", [b"", HEAD])
def test_a_head_that_does_not_come_is_not_waited_for(
    begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)

    async def run() -> None:
        async with connected() as (reader, writer):
            writer.write(begin)
            answer = await asyncio.wait_for(reader.read(), 5)
            assert answer.startswith(b"HTTP/1.1 408 ")

    asyncio.run(run())


def test_bodies_and_slow_answers_have_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    body = b"x" * (4 * MOST_HEAD_BYTES)

    async def run() -> None:
        async with connected() as (reader, writer):
            for _ in range(2):  # on the same connection
                writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body[:1000])
                await asyncio.sleep(0.3)
                writer.write(body[1000:])
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ")
                assert await reader.readexactly(6) == str(len(body)).encode()
                await asyncio.sleep(0.3)

    asyncio.run(run())
