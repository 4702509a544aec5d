"""As whom a request counts: by its key, otherwise by its address as connections are counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.memory.clients.requests import RequestPool
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger
from penstock.server.http.bodies import BodyLimits
from penstock.server.http.exchange import Exchange


@pytest.mark.parametrize(
    ("address", "caller"),
    [
        ("192.168.1.7", "192.168.1.7"),
        ("::ffff:192.168.1.7", "192.168.1.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("127.0.0.9", "loopback"),
        ("::1", "loopback"),
    ],
)
def test_requests_count_by_key_or_address(address: str, caller: str) -> None:
    async def nothing(*_: Any) -> Any: ...

    pool = RequestPool(Ledger({RAM: 1 << 30}), 1 << 20, 1 << 20, patience_s=1.0)
    scope = {"headers": [], "client": (address, 1)}
    memory, limits = pool.request_memory(), BodyLimits(1 << 20)
    exchange = Exchange(scope, nothing, nothing, "id", memory, limits, asyncio.Event())
    assert exchange.caller == caller
    exchange.key = "key 1"
    assert exchange.caller == "key 1"
