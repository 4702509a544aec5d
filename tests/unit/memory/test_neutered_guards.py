"""Each guard of the server's side, switched off alone: the test that watches it must fail.

The worker's guards have theirs beside the worker's tests; `docs/memory.md` lists all of them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import Overloaded
from penstock.memory import admission, gauge, governor, ledger, requests, slack
from penstock.memory.admission import (
    LoadNeed,
    ModelRoom,
    Refuse,
    RequestNeed,
    Resident,
    decide,
    decide_load,
)
from penstock.memory.baseline import Baseline
from penstock.memory.events import Events
from penstock.memory.ledger import Ledger, OutOfBudget, Purpose
from penstock.memory.requests import RequestPool
from penstock.server import queue
from penstock.server.api import backlog
from penstock.server.api.generation import Piece
from penstock.server.queue import Capacity, Lane
from penstock.testing import tokenizers
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

KV = ("ram", Purpose.KV)
ROOM = ModelRoom("m", "ram", 1000, 10, 16, 1600, 1000)
PINNED = Resident("p", "ram", 6000, 500, 0, 500, idle=True, pinned=True, used_at=0)
BUSY = Resident("b", "ram", 10, 100, 100, 10, idle=False, pinned=False, used_at=0)

GROUPED = governor.Readings(
    gauge.RamReading(1 << 40, 1 << 39, None, None, (gauge.GroupReading(1000, 900),)), (), {}
)


def budget() -> None:
    books = Ledger({"ram": 10})
    with pytest.raises(OutOfBudget):
        books.reserve("a", {KV: 11})


def capacity() -> None:
    books = Ledger({"ram": 10}, {"ram": 100})
    books.observe("ram", 95)
    with pytest.raises(OutOfBudget):
        books.reserve("a", {KV: 6})


def window() -> None:
    assert isinstance(
        decide(RequestNeed(1000, 1), Ledger({"ram": 1 << 40}).snapshot(), ROOM), Refuse
    )


def never_fits() -> None:
    assert isinstance(decide(RequestNeed(900, 1), Ledger({"ram": 5000}).snapshot(), ROOM), Refuse)


def pinned_model() -> None:
    snapshot = Ledger({"ram": 9000}).snapshot()
    assert isinstance(decide(RequestNeed(300, 1), snapshot, ROOM, [PINNED]), Refuse)


def model_too_large() -> None:
    need = LoadNeed("m", "ram", {("ram", Purpose.WEIGHTS): 100}, 10, 10, 10)
    assert isinstance(decide_load(need, Ledger({"ram": 109}).snapshot(), []), Refuse)


def kv_in_use() -> None:
    assert admission.choose_shed([BUSY], 50, keep_bytes=0) == ()


def model_in_use() -> None:
    assert admission.choose_victims([BUSY], "ram", 50) == ()


def request_bytes() -> None:
    async def body() -> None:
        books = Ledger({"ram": 400})
        pool = RequestPool(books, 50, 1000, patience_s=0.01)
        books.reserve("m", {KV: 350})
        with pytest.raises(Overloaded):
            await pool.take(51)

    asyncio.run(body())


def request_floor() -> None:
    async def body() -> None:
        books = Ledger({"ram": 2 << 30})
        pool = RequestPool(books, requests.floor_bytes(2 << 30), 1 << 30, patience_s=0.01)
        books.reserve("m", {KV: books.free("ram")})
        await asyncio.gather(pool.take(1000), return_exceptions=True)
        assert pool.used_bytes == 1000

    asyncio.run(body())


def queue_bound() -> None:
    async def body() -> None:
        lane = Lane("m", most_requests=1, most_bytes=1 << 20, deadline_s=1)
        with lane.visit("", 0, 1), pytest.raises(Overloaded):
            lane.visit("", 0, 1)

    asyncio.run(body())


def governor_hold() -> None:
    async def body() -> None:
        lane = Lane("m", most_requests=9, most_bytes=1 << 20, deadline_s=0.01)
        lane.capacity = lambda: Capacity(0, 9, 1 << 20, held=True)
        with lane.visit("", 0, 1) as visit, pytest.raises(Overloaded):
            async with visit.turn(1, 1):
                pass

    asyncio.run(body())


def shed_list() -> None:
    called: list[str] = []

    async def act(domain: str, size: int) -> None:
        called.append(domain)

    books = Ledger({"ram": 10}, {"ram": 100})
    books.observe("ram", 101)
    watch = governor.Governor(books, None, [governor.Act("a", act)], set(), Events())  # type: ignore[arg-type]
    asyncio.run(watch._mend("ram"))
    assert called == ["ram"]


def settling() -> None:
    books = Ledger({"ram": 10})
    booking = books.reserve("a", {KV: 10})
    booking.settle()
    assert books.free("ram") == 0


def refusal_without_tokenising() -> None:
    assert tokenizers.byte_level().least_tokens("x" * 100_000) > 0


def control_group() -> None:
    assert governor.outside(GROUPED)["ram"] == (900, 1000)


def slow_client() -> None:
    async def body() -> None:
        pool = RequestPool(Ledger({"ram": 1 << 30}), 1 << 20, 1 << 26, 1.0)
        backlog.Backlog(pool.share()).put(Piece(0, "a", [1], [0]))
        assert pool.used_bytes >= backlog.PIECE_BYTES

    asyncio.run(body())


def drift() -> None:
    kept = slack.Slack(100 << 20)
    kept.observe(20 << 20)
    assert kept.bytes == 20 << 20


def tokenizer_read() -> None:
    books = Ledger({"ram": 1000})
    baseline = Baseline(books, "server", 100)
    baseline.expect(50)
    assert books.free("ram") == 850


OFF: dict[Callable[[], None], tuple[Any, str, Any]] = {
    budget: (ledger._Domain, "free", property(lambda self: 1 << 60)),
    capacity: (Ledger, "observe", lambda *_: None),
    window: (ModelRoom, "window", 1 << 60),
    never_fits: (admission, "largest_kv", lambda *_: 1 << 60),
    pinned_model: (admission, "_pinned", lambda *_, **__: 0),
    model_too_large: (admission, "_permanent", lambda _: -(1 << 60)),
    kv_in_use: (Resident, "kv_used_bytes", 0),
    model_in_use: (Resident, "idle", True),
    request_bytes: (RequestPool, "_try", lambda self, size: True),
    request_floor: (requests, "floor_bytes", lambda _: 0),
    queue_bound: (Lane, "visit", lambda self, *a: queue.Visit(self, a[0], a[1], a[2], 0.0)),
    governor_hold: (Lane, "_may_start", lambda *_: True),
    shed_list: (governor.Governor, "_shed", lambda *_: asyncio.sleep(0)),
    settling: (ledger.Reservation, "settle", ledger.Reservation.release),
    control_group: (gauge.RamReading, "groups", ()),
    slow_client: (requests.Share, "grow_now", lambda *_: None),
    drift: (slack.Slack, "observe", lambda *_: None),
    tokenizer_read: (Baseline, "expect", lambda *_: None),
    refusal_without_tokenising: (Tokenizer, "least_tokens", lambda *_: 0),
}


@pytest.mark.parametrize("guard", OFF, ids=lambda guard: guard.__name__)
def test_a_guard_that_is_off_is_noticed(
    guard: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    guard()
    monkeypatch.setattr(*OFF[guard])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        guard()
