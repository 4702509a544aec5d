"""Heads of requests: how long and how late, over real sockets and uvicorn itself."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from penstock.server import logs
from penstock.server.http import connection, peer
from penstock.server.http.connection import MAX_HEAD_BYTES, MAX_HEADERS
from penstock.server.http.connections import Connections
from penstock.server.http.listening import Wire, protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

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
async def connected(
    app: Any = app,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    config = uvicorn.Config(
        app,
        http=Wire,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        serving = asyncio.create_task(server.serve([sock]))
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        yield reader, writer
        writer.transport.abort()
        server.should_exit = True
        await asyncio.wait_for(serving, 30)


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
            assert sent < 32 * MAX_HEAD_BYTES  # what sockets themselves hold
            with contextlib.suppress(ConnectionError):  # a reset may overtake the answer
                answer = await reader.read()
                assert not answer or answer.startswith(b"HTTP/1.1 431 ")

    asyncio.run(run())


def test_a_long_head_is_told_so() -> None:
    async def run() -> None:
        async with connected() as (reader, writer):
            writer.write(HEAD + b"a: " + b"b" * MAX_HEAD_BYTES + b"\r\n\r\n")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 431 ")
            assert str(MAX_HEAD_BYTES).encode() in answer

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
    body = b"x" * (4 * MAX_HEAD_BYTES)

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


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(size)


def test_too_many_headers_are_refused() -> None:
    async def run() -> None:
        async with connected() as (reader, writer):
            writer.write(HEAD + b"a:b\r\n" * (MAX_HEADERS + 1))
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 431 ")
            assert str(MAX_HEADERS).encode() in answer

    asyncio.run(run())


def test_of_a_pipeline_little_is_parsed_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    begin = connection.Connection.on_message_begin

    def counted(self: connection.Connection) -> None:
        parsed.append(1)
        begin(self)

    monkeypatch.setattr(connection.Connection, "on_message_begin", counted)
    tiny = b"GET / HTTP/1.1\r\n\r\n"

    async def run() -> None:
        async with connected() as (reader, writer):
            writer.write(tiny * 40)
            await asyncio.sleep(0.2)  # the first is answered after 0.4
            assert len(parsed) <= 15
            for _ in range(3):
                assert (await read_answer(reader)).endswith(b"0")

    asyncio.run(run())


def test_all_of_a_pipeline_is_answered_in_order() -> None:
    async def run() -> None:
        async with connected() as (reader, writer):
            for size in (1, 700, 20_000, 3):
                body = b"x" * size
                writer.write(HEAD + b"content-length: %d\r\n\r\n" % size + body)
            for size in (1, 700, 20_000, 3):
                assert (await read_answer(reader)).endswith(b"\r\n\r\n%d" % size)

    asyncio.run(run())


def test_a_client_that_closes_its_sending_half_is_answered() -> None:
    async def run() -> None:
        async with connected() as (reader, writer):
            writer.write(HEAD + b"content-length: 3\r\n\r\nabc")
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 5)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.endswith(b"3")

    asyncio.run(run())


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_from_another_machine_too(version: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the packets of its end can be seen."""
    monkeypatch.setattr(peer, "is_loopback_address", lambda address: False)

    async def run() -> None:
        async with connected() as (reader, writer):
            writer.write(b"POST / HTTP/%b\r\ncontent-length: 3\r\n\r\nabc" % version)
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 5)
            assert b" 200 " in answer
            assert answer.endswith(b"\r\n\r\n3")

    asyncio.run(run())


@pytest.mark.parametrize("behind", [b"", b"GET / HTTP/1.1\r\n\r\n" * 1000], ids=["plain", "more"])
def test_a_client_that_leaves_is_noticed_though_nothing_is_read(behind: bytes) -> None:
    left = asyncio.Event()

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        await scope["extensions"][connection.GONE]
        left.set()

    async def run() -> None:
        async with connected(waiting) as (_, writer):
            writer.write(HEAD + b"content-length: 100000\r\n\r\n" + b"x" * 20_000 + behind)
            await asyncio.sleep(0.1)
            assert not left.is_set()
            writer.close()
            await asyncio.wait_for(left.wait(), 5)

    asyncio.run(run())


def test_of_a_body_that_nobody_wants_little_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    received = connection.Connection.data_received

    def counted(self: connection.Connection, data: bytes) -> None:
        read.append(len(data))
        received(self, data)

    monkeypatch.setattr(connection.Connection, "data_received", counted)

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        await scope["extensions"][connection.GONE]

    async def run() -> None:
        async with connected(waiting) as (_, writer):
            writer.write(HEAD + b"content-length: 1000000\r\n\r\n" + b"x" * 500_000)
            await asyncio.sleep(0.2)
            assert sum(read) <= 20_000

    asyncio.run(run())


def test_chunk_extensions_are_bounded() -> None:
    async def run() -> None:
        async with connected() as (_, writer):
            writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
            assert await send_until_closed(writer, b"1;" + b"x" * 5000, 8 << 20) < 8 << 20

    asyncio.run(run())


def test_tiny_chunks_let_others_have_their_turn() -> None:
    """Of a read of 16 KiB only a few are parsed at once."""
    longest = 0
    parsed: list[int] = []
    begin, body = connection.Connection._parse, connection.Connection.on_body

    def parse(self: connection.Connection) -> None:
        nonlocal longest
        parsed.clear()
        begin(self)
        longest = max(longest, len(parsed))

    def on_body(self: connection.Connection, piece: bytes) -> None:
        parsed.append(1)
        body(self, piece)

    async def run() -> None:
        async with connected() as (reader, writer):
            writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 5000)
            writer.write(b"0\r\n\r\n")
            assert (await read_answer(reader)).endswith(b"5000")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection.Connection, "_parse", parse)
        patch.setattr(connection.Connection, "on_body", on_body)
        asyncio.run(run())
    assert 0 < longest < 200


def test_all_connections_are_counted_together() -> None:
    """An empty `Connections` is still the one that was given."""

    async def run() -> None:
        shared = Connections(max_connections=5)
        config = uvicorn.Config(app, log_config=None)
        wires = [protocol(shared)(config, ServerState(), {}) for _ in range(2)]
        assert all(wire._connections is shared for wire in wires)

    asyncio.run(run())


def test_nothing_is_kept_of_a_connection_that_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last bytes may be waited for; once it is gone nothing holds it."""
    made: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()
    begin = connection.Connection.connection_made

    def noted(self: connection.Connection, transport: asyncio.Transport) -> None:
        made.add(transport)
        begin(self, transport)

    monkeypatch.setattr(connection.Connection, "connection_made", noted)

    async def run() -> None:
        async with connected() as (_, writer):
            address = writer.get_extra_info("peername")
            for _ in range(20):
                reader, other = await asyncio.open_connection(*address)
                other.write(HEAD + b"a:b\r\n" * (MAX_HEADERS + 1))
                await reader.read()
                other.close()
            await asyncio.sleep(0.1)
            gc.collect()
            assert len(made) <= 2, "those of before are kept"

    asyncio.run(run())


def test_chunks_of_a_byte_are_a_body() -> None:
    async def run() -> None:
        async with connected() as (reader, writer):
            chunks = b"1\r\nx\r\n" * 30_000 + b"0\r\n\r\n"
            writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks)
            assert (await read_answer(reader)).endswith(b"30000")

    asyncio.run(run())


async def streaming(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for piece in (b"one ", b"two "):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"three"})


def test_http_1_0_is_answered_without_chunks() -> None:
    async def run() -> None:
        async with connected(streaming) as (reader, writer):
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert body == b"one two three"
            assert b"transfer-encoding" not in head
            assert b"connection: close" in head

    asyncio.run(run())


@pytest.fixture
def log_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this process logs meanwhile."""
    root, http, ours = map(logging.getLogger, (None, "uvicorn.error", "penstock"))
    monkeypatch.setattr(logging, "raiseExceptions", logging.raiseExceptions)
    monkeypatch.setattr(http, "filters", http.filters)
    handlers, levels = root.handlers, (root.level, ours.level)
    logs.configure("info", tmp_path / "log")
    yield tmp_path / "log"
    for handler in root.handlers:
        handler.close()
    root.handlers = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def test_lines_that_are_no_http_do_not_fill_the_log(log_file: Path) -> None:
    async def body() -> None:
        async with connected() as (_, writer):
            address = writer.get_extra_info("peername")
            for _ in range(5 * logs.HTTP_RECORDS):
                reader, other = await asyncio.open_connection(*address)
                other.write(b"no http at all\r\n\r\n")
                assert b"400" in await reader.read()
                other.close()

    asyncio.run(body())
    assert log_file.read_text().count("Invalid HTTP request") == logs.HTTP_RECORDS
