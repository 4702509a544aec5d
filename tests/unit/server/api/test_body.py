"""Bodies: what is booked of one that only comes slowly, or is other than it seems."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock.errors import BadRequest, BodyTooLarge
from penstock.memory.ledger import Ledger
from penstock.memory.requests import BODY_FACTOR, RequestPool, decoded_bytes
from penstock.server.api import exchange as module
from penstock.server.api.exchange import Exchange

MIB = 1 << 20


def pool(limit: int = 1024 * MIB) -> RequestPool:
    return RequestPool(Ledger({"ram": limit}), MIB, 256 * MIB, patience_s=5.0)


def incoming(requests: RequestPool, announced: int, *pieces: bytes) -> Exchange:
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
    return Exchange(scope, receive, send, "id", requests.share(), 32 * MIB, asyncio.Event())


def test_what_is_only_announced_is_not_kept_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BODY_S", 0.2)

    async def run() -> None:
        requests = pool()
        exchange = incoming(requests, 32 * MIB, b"x")

        async def read() -> None:
            async with exchange.body():
                raise AssertionError

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        assert requests.used_bytes == BODY_FACTOR * MIB
        with pytest.raises(BadRequest, match="stopped after 1 bytes"):
            await reading
        exchange.share.release()
        assert requests.used_bytes == 0

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
        exchange.share.release()
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
        exchange.share.release()
        assert requests.used_bytes == 0

    asyncio.run(run())
