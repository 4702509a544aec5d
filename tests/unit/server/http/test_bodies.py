"""Bodies: what is booked of one that only comes slowly, or is other than it seems."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest, BodyTooLarge, BodyTooSlow, Overloaded, UnknownEncoding
from penstock.memory.clients import requests as memory_requests
from penstock.memory.clients import waits
from penstock.memory.clients.json_weight import BODY_FACTOR, JsonWeight, decoded_bytes
from penstock.memory.clients.requests import RequestPool
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger
from penstock.server.http import exchange as exchange_module
from penstock.server.http.bodies import BodyLimits
from penstock.server.http.exchange import Exchange

MIB = 1 << 20


def pool(limit: int = 1024 * MIB) -> RequestPool:
    return RequestPool(Ledger({RAM: limit}), MIB, 256 * MIB, patience_s=5.0)


def incoming(
    requests: RequestPool,
    announced: int,
    *pieces: bytes,
    limits: BodyLimits = BodyLimits(32 * MIB),  # noqa: B008 - frozen
) -> Exchange:
    """A request that says it has so many bytes and sends these; behind them, silence."""
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    if sum(map(len, pieces)) == announced:
        messages[-1]["more_body"] = False

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        return await asyncio.Future()

    async def send(_: Any) -> None: ...

    scope = {"headers": [(b"content-length", str(announced).encode())]}
    return Exchange(scope, receive, send, "id", requests.request_memory(), limits, asyncio.Event())


def test_what_is_only_announced_is_not_kept_for_it() -> None:
    async def run() -> None:
        requests = pool()
        exchange = incoming(requests, 32 * MIB, b"x", limits=BodyLimits(32 * MIB, grace_s=0.2))

        async def read() -> None:
            async with exchange.body():
                raise AssertionError

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        assert requests.used_bytes <= BODY_FACTOR * 16 << 10
        with pytest.raises(BodyTooSlow, match=r"1 bytes came in .*server\.body_rate"):
            await reading
        exchange.memory.release()
        assert requests.used_bytes == 0

    asyncio.run(run())


def test_a_body_that_stops_ends_when_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_requests, "PATIENCE_S", 0.05)
    monkeypatch.setattr(waits, "_SLOW_S", 0.1)

    async def run() -> None:
        requests = pool(64 * MIB)  # 16 for requests
        slow = incoming(requests, 3 * MIB, b" " * (2 * MIB))

        async def read() -> None:
            async with slow.body():
                raise AssertionError

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        assert requests.used_bytes == 15 * MIB
        waiting = asyncio.create_task(requests.request_memory("other").grow(4 * MIB))
        with pytest.raises(Overloaded, match=r"2097152 bytes came in .* try again shortly"):
            await reading
        slow.memory.release()
        await waiting

    asyncio.run(run())


@pytest.mark.parametrize(
    ("waited_s", "held", "left"),
    [
        (0, 0, 10),
        (10, 0, 0),
        (39, 5_000_000, 60),  # 1 Mbit/s, to the end
        (20, 100 << 10, -3.75),  # 5 KiB/s
        (599, 100 << 20, 1),
    ],
)
def test_a_body_must_come_at_a_rate_and_in_time(waited_s: float, held: int, left: float) -> None:
    assert BodyLimits(32 * MIB).left_s(waited_s, held) == pytest.approx(left)


def packed(exchange: Exchange, encoding: bytes = b"gzip") -> Exchange:
    exchange.scope["headers"].append((b"content-encoding", encoding))
    return exchange


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
@pytest.mark.parametrize("step", [1, 1000, 10**6])
def test_a_compressed_body_is_unpacked(pack: Any, step: int) -> None:
    async def run() -> None:
        requests = pool()
        body = json.dumps({"a": "word " * 30_000}).encode()
        sent = pack(body[:1000]) + pack(body[1000:]) if pack is gzip.compress else pack(body)
        pieces = [sent[at : at + step] for at in range(0, len(sent), step)]
        exchange = packed(incoming(requests, len(sent), *pieces))
        async with exchange.body() as content:
            assert content == body
            assert requests.used_bytes >= decoded_bytes(body)
        exchange.memory.release()

    asyncio.run(run())


def test_a_compressed_body_is_bounded_by_what_it_becomes() -> None:
    async def run() -> None:
        requests = pool()
        sent = gzip.compress(bytes(64 * MIB))
        exchange = packed(incoming(requests, len(sent), sent))
        tracemalloc.start()
        with pytest.raises(BodyTooLarge, match=r"server\.max_body"):
            async with exchange.body():
                raise AssertionError
        assert tracemalloc.get_traced_memory()[1] < 40 * MIB
        tracemalloc.stop()
        exchange.memory.release()

    asyncio.run(run())


def test_a_compressed_body_is_bounded_by_what_comes_too() -> None:
    """Blocks without content, of which there may be as many as one likes."""
    nothing = b"\x00\x00\x00\xff\xff" * 3000
    sent = itertools.chain([b"\x78\x9c"], itertools.repeat(nothing, 2000))

    async def run() -> None:
        exchange = packed(incoming(pool(), 0, *sent, limits=BodyLimits(MIB, whole_s=0.1)))
        with pytest.raises(BodyTooLarge, match=r"server\.max_body"):
            async with exchange.body():
                raise AssertionError
        exchange.memory.release()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("encoding", "sent", "error"),
    [
        (b"br", b"xyz", UnknownEncoding),
        (b"gzip, gzip", b"xyz", UnknownEncoding),
        (b"gzip", b"xyz", BadRequest),
        (b"gzip", gzip.compress(b"x" * 1000, mtime=0)[:-9], BadRequest),
        (b"gzip", gzip.compress(b"x", mtime=0) + b"rest", BadRequest),
        (b"gzip", gzip.compress(b"", mtime=0) * 100 + gzip.compress(b"{}", mtime=0), BadRequest),
    ],
)
def test_what_cannot_be_unpacked_is_refused(encoding: bytes, sent: bytes, error: Any) -> None:
    async def run() -> None:
        exchange = packed(incoming(pool(), len(sent), sent), encoding)
        with pytest.raises(error):
            async with exchange.body():
                raise AssertionError
        exchange.memory.release()

    asyncio.run(run())


def test_a_byte_order_mark_is_skipped() -> None:
    async def run() -> None:
        exchange = incoming(pool(), 5, b"\xef\xbb\xbf{}")
        async with exchange.body() as content:
            assert content == b"{}"
        exchange.memory.release()

    asyncio.run(run())


def test_a_body_of_many_small_values_is_booked_before_it_is_decoded() -> None:
    async def run() -> None:
        requests = pool()
        body = json.dumps({"a": [[]] * 300_000}, separators=(",", ":")).encode()
        exchange = incoming(requests, len(body), body[:1000], body[1000:])
        async with exchange.body() as content:
            assert content == body
            assert requests.used_bytes == decoded_bytes(body) > 20 * len(body)
        assert requests.used_bytes == decoded_bytes(body) - (BODY_FACTOR - 1) * len(body)
        exchange.memory.release()
        assert requests.used_bytes == 0

    asyncio.run(run())


def test_what_could_never_be_held_is_too_large_and_not_for_later() -> None:
    async def run() -> None:
        requests = pool(limit=64 * MIB)  # of which requests may have a quarter
        body = json.dumps({"a": [[]] * 300_000}, separators=(",", ":")).encode()
        exchange = incoming(requests, len(body), body)
        with pytest.raises(BodyTooLarge, match=r"memory\.limit") as caught:
            async with exchange.body():
                raise AssertionError
        assert caught.value.numbers is not None
        assert caught.value.numbers["needed_bytes"] == decoded_bytes(body)
        exchange.memory.release()
        assert requests.used_bytes == 0

    asyncio.run(run())


def test_a_body_with_too_much_in_it_is_refused_as_it_comes_and_nothing_of_it_is_held() -> None:
    piece = b'{"a":1},' * (8 << 10)

    async def run() -> None:
        requests = pool()
        pieces = [b'{"messages":[', *[piece] * 300]
        exchange = incoming(requests, sum(map(len, pieces)) + 10, *pieces)
        tracemalloc.start()
        with pytest.raises(BadRequest, match="65536 objects"):
            async with exchange.body():
                raise AssertionError
        assert tracemalloc.get_traced_memory()[0] < MIB
        tracemalloc.stop()
        assert requests.used_bytes == 0

    discard_s = exchange_module._DISCARD_S
    exchange_module._DISCARD_S = 0.1  # the rest of it never comes
    try:
        asyncio.run(run())
    finally:
        exchange_module._DISCARD_S = discard_s


@given(
    st.lists(
        st.sampled_from([b'{"', b"{", b'"', b"\\", b"u", b"a ", b"[", b":", b",", b"\xc3\xa4"])
    ),
    st.lists(st.integers(0, 60)),
)
def test_a_body_weighs_the_same_in_whatever_pieces_it_comes(
    parts: list[bytes], cuts: list[int]
) -> None:
    body = b"".join(parts)
    whole, pieces = JsonWeight(), JsonWeight()
    whole.add(body)
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    for start, end in itertools.pairwise(places):
        pieces.add(body[start:end])
    assert vars(pieces) == vars(whole)
