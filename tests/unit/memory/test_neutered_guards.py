"""Each guard of the server's side, switched off alone: the test that watches it must fail.

The worker's guards have theirs beside its tests; `docs/memory-internals.md` lists all of them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import Overloaded
from penstock.memory import admission, eviction, governor, ledger
from penstock.memory.admission import (
    LoadNeed,
    ModelCapacity,
    Refuse,
    RequestNeed,
    decide,
    decide_load,
)
from penstock.memory.bookings import ProcessBooking
from penstock.memory.clients import requests
from penstock.memory.clients.requests import RequestPool
from penstock.memory.cost import GroupCost, KvCost
from penstock.memory.domains import RAM, Domain
from penstock.memory.events import Events
from penstock.memory.eviction import ModelUsage
from penstock.memory.ledger import Ledger, OutOfBudget, Purpose
from penstock.memory.readings import gauge
from penstock.server.pipeline import backlog, queue
from penstock.server.pipeline.pieces import Piece
from penstock.server.pipeline.queue import Capacity, ModelQueue
from penstock.server.residency.drift_reserve import DriftReserve
from penstock.testing import tokenizers
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

KV = (RAM, Purpose.KV)
ROOM = ModelCapacity("m", RAM, 1000, KvCost((GroupCost(160),), 16), 1600, 1000)
PINNED = ModelUsage("p", RAM, 6000, 500, 0, 500, idle=True, pinned=True, used_at=0)
BUSY = ModelUsage("b", RAM, 10, 100, 100, 10, idle=False, pinned=False, used_at=0)

GROUPED = governor.Readings(
    gauge.RamReading(1 << 40, 1 << 39, (gauge.GroupReading(1000, 900),)), (), {}
)


def budget() -> None:
    books = Ledger({RAM: 10})
    with pytest.raises(OutOfBudget):
        books.reserve("a", {KV: 11})


def capacity() -> None:
    books = Ledger({RAM: 10}, {RAM: 100})
    books.observe(RAM, 95)
    with pytest.raises(OutOfBudget):
        books.reserve("a", {KV: 6})


def window() -> None:
    assert isinstance(decide(RequestNeed(1000, 1), Ledger({RAM: 1 << 40}).snapshot(), ROOM), Refuse)


def never_fits() -> None:
    assert isinstance(decide(RequestNeed(900, 1), Ledger({RAM: 5000}).snapshot(), ROOM), Refuse)


def pinned_model() -> None:
    snapshot = Ledger({RAM: 9000}).snapshot()
    assert isinstance(decide(RequestNeed(300, 1), snapshot, ROOM, [PINNED]), Refuse)


def model_too_large() -> None:
    need = LoadNeed("m", RAM, {(RAM, Purpose.WEIGHTS): 100}, 10, 10, 10)
    assert isinstance(decide_load(need, Ledger({RAM: 109}).snapshot(), []), Refuse)


def kv_in_use() -> None:
    assert eviction.choose_shed([BUSY], 50, keep_bytes=0) == ()


def model_in_use() -> None:
    assert eviction.choose_victims([BUSY], RAM, 50) == ()


def request_bytes() -> None:
    async def body() -> None:
        books = Ledger({RAM: 400})
        pool = RequestPool(books, 50, 1000, patience_s=0.01)
        books.reserve("m", {KV: books.free(RAM)})
        with pytest.raises(Overloaded):
            await pool.request_memory().grow(51)

    asyncio.run(body())


def request_floor() -> None:
    async def body() -> None:
        books = Ledger({RAM: 2 << 30})
        pool = RequestPool(books, requests.floor_bytes(2 << 30), 1 << 30, patience_s=0.01)
        books.reserve("m", {KV: books.free(RAM)})
        await asyncio.gather(pool.request_memory().grow(1000), return_exceptions=True)
        assert pool.used_bytes == 1000

    asyncio.run(body())


def queue_bound() -> None:
    async def body() -> None:
        queue = ModelQueue("m", max_requests=1, max_bytes=1 << 20, deadline_s=1)
        with queue.request("", 0, 1), pytest.raises(Overloaded):
            queue.request("", 0, 1)

    asyncio.run(body())


def governor_hold() -> None:
    async def body() -> None:
        queue = ModelQueue("m", max_requests=9, max_bytes=1 << 20, deadline_s=0.01)
        queue.capacity = lambda: Capacity(0, 9, 1 << 20, held=True)
        with queue.request("", 0, 1) as queued, pytest.raises(Overloaded):
            async with queued.slot(1, 1):
                pass

    asyncio.run(body())


def shed_list() -> None:
    called: list[Domain] = []

    async def act(domain: Domain, size: int) -> None:
        called.append(domain)

    books = Ledger({RAM: 10}, {RAM: 100})
    books.observe(RAM, 101)
    watch = governor.Governor(books, None, [governor.Act("a", act)], set(), Events())  # type: ignore[arg-type]
    asyncio.run(watch._mend(RAM))
    assert called == [RAM]


def exiting() -> None:
    books = Ledger({RAM: 10})
    booking = books.reserve("a", {KV: 10})
    booking.mark_exiting()
    assert books.free(RAM) == 0


def refusal_without_tokenising() -> None:
    assert tokenizers.byte_level().min_tokens_of("x" * 100_000) > 0


def control_group() -> None:
    assert governor.outside(GROUPED)[RAM] == (900, 1000)


def slow_client() -> None:
    async def body() -> None:
        pool = RequestPool(Ledger({RAM: 1 << 30}), 1 << 20, 1 << 26, 1.0)
        with backlog.Backlogs(1 << 20).open(pool.request_memory()) as unread:
            unread.put(Piece(0, "a", [1], [0]))
            assert pool.used_bytes >= backlog.PIECE_BYTES

    asyncio.run(body())


def drift() -> None:
    kept = DriftReserve(100 << 20)
    kept.observe(20 << 20)
    assert kept.bytes == 20 << 20


def tokenizer_read() -> None:
    books = Ledger({RAM: 1000})
    baseline = ProcessBooking(books, "server", 100)
    baseline.expect(50)
    assert books.free(RAM) == 850


OFF: dict[Callable[[], None], tuple[Any, str, Any]] = {
    budget: (ledger._DomainBooks, "free", property(lambda self: 1 << 60)),
    capacity: (Ledger, "observe", lambda *_: None),
    window: (ModelCapacity, "window", 1 << 60),
    never_fits: (admission, "largest_kv", lambda *_: 1 << 60),
    pinned_model: (admission, "pinned_bytes", lambda *_, **__: 0),
    model_too_large: (admission, "_permanent", lambda _: -(1 << 60)),
    kv_in_use: (ModelUsage, "kv_used_bytes", 0),
    model_in_use: (ModelUsage, "idle", True),
    request_bytes: (RequestPool, "_serve", lambda self, waiter, overdue: True),
    request_floor: (requests, "floor_bytes", lambda _: 0),
    queue_bound: (
        ModelQueue,
        "request",
        lambda self, *a: queue.QueuedRequest(self, a[0], a[1], a[2], 0.0),
    ),
    governor_hold: (ModelQueue, "_may_start", lambda *_: True),
    shed_list: (governor.Governor, "_shed", lambda *_: asyncio.sleep(0)),
    exiting: (ledger.Reservation, "mark_exiting", ledger.Reservation.release),
    control_group: (gauge.RamReading, "groups", ()),
    slow_client: (requests.RequestMemory, "grow_now", lambda *_: None),
    drift: (DriftReserve, "observe", lambda *_: None),
    tokenizer_read: (ProcessBooking, "expect", lambda *_: None),
    refusal_without_tokenising: (Tokenizer, "min_tokens_of", lambda *_: 0),
}


@pytest.mark.parametrize("guard", OFF, ids=lambda guard: guard.__name__)
def test_a_guard_that_is_off_is_noticed(
    guard: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    guard()
    monkeypatch.setattr(*OFF[guard])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        guard()
