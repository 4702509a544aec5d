"""Readings, shortage, the order of acts, and letting go, over a machine of three numbers."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.memory.domains import RAM, Domain
from penstock.memory.events import Events
from penstock.memory.governor import (
    BUSY_S,
    IDLE_S,
    RELEASE_TURNS,
    SHORT_S,
    Act,
    Governor,
    Readings,
    outside,
)
from penstock.memory.ledger import Ledger, Purpose, Reservation
from penstock.memory.readings.gauge import GpuReading, GroupReading, ProcessReading, RamReading

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

CAPACITY = 10_000
SPARE = 500
LIMIT = 8_000


def process(private: int) -> ProcessReading:
    return ProcessReading(*[private] * 5)


def readings(others: int, own: int = 1000, groups: tuple[GroupReading, ...] = ()) -> Readings:
    ram = RamReading(CAPACITY, CAPACITY - others - own, groups)
    return Readings(ram, (), {"server": process(own)})


@dataclass
class Machine:
    """A watch whose readings the test sets, and acts that each free so much."""

    others: int = 0
    is_busy: bool = True
    reconciled: int = 0
    failures: list[Exception] = field(default_factory=list)  # of the turns to come
    ledger: Ledger = field(
        default_factory=lambda: Ledger({RAM: LIMIT}, {RAM: CAPACITY}, {RAM: SPARE})
    )
    held: set[Domain] = field(default_factory=set)
    events: Events = field(default_factory=Events)
    called: list[str] = field(default_factory=list)

    def reader(self) -> Callable[[], Readings]:
        return self._read

    def _read(self) -> Readings:
        if self.failures:
            raise self.failures.pop(0)
        return readings(self.others)

    def reconcile(self, _: Readings) -> None:
        self.reconciled += 1

    def busy(self) -> bool:
        return self.is_busy

    def act(self, name: str, booking: Reservation | None, least: int = 0) -> Act:
        async def shed(domain: Domain, size: int) -> None:
            self.called.append(name)
            if booking is not None:
                left = max(booking.total() - size, least)
                booking.resize({(domain, Purpose.KV): left})

        return Act(name, shed)

    def governor(self, *acts: Act) -> Governor:
        return Governor(self.ledger, self, acts, self.held, self.events)


def turns(governor: Governor, count: int = 1) -> None:
    async def body() -> None:
        for _ in range(count):
            await governor.turn()

    asyncio.run(body())


def test_the_tightest_bound_counts_and_our_own_bytes_are_not_external() -> None:
    assert outside(readings(3000)) == {RAM: (3000, CAPACITY)}
    group = GroupReading(limit_bytes=6000, used_bytes=4000)
    assert outside(readings(3000, groups=(group,))) == {RAM: (3000, 6000)}
    wide = GroupReading(limit_bytes=9000, used_bytes=1000)
    assert outside(readings(3000, groups=(wide,))) == {RAM: (3000, CAPACITY)}
    gpu = GpuReading(0, "gpu", "GPU-0", total_bytes=100, free_bytes=30)
    read = Readings(readings(0).ram, [gpu], {}, {Domain.gpu(0): 50})
    assert outside(read)[Domain.gpu(0)] == (20, 100)


def test_the_shed_list_is_walked_in_order_and_only_as_far_as_needed() -> None:
    machine = Machine()
    first = machine.ledger.reserve("model:a", {(RAM, Purpose.KV): 1000})
    second = machine.ledger.reserve("model:b", {(RAM, Purpose.KV): 4000})
    machine.others = 5600
    governor = machine.governor(
        machine.act("caches", None),
        machine.act("kv", first),
        machine.act("idle", second),
        machine.act("last", None),
    )
    turns(governor)
    assert machine.called == ["caches", "kv", "idle"]
    state = machine.ledger.snapshot()[RAM]
    assert not state.short
    assert state.free_bytes >= SPARE  # with something over
    shed = [row for row in machine.events.rows() if row["event"] == "shed"]
    assert [row["act"] for row in shed] == ["kv", "idle"]
    assert shed[0]["before_bytes"] == 5000
    assert shed[0]["after_bytes"] == 4000
    assert machine.reconciled == 1


def test_a_domain_is_held_while_short_and_let_go_with_room_over() -> None:
    machine = Machine()
    booking = machine.ledger.reserve("model:a", {(RAM, Purpose.KV): 5000})
    governor = machine.governor(machine.act("kv", booking, least=4000))
    machine.others = 6000  # 4000 at least stay: short by 500
    turns(governor)
    assert machine.held == {RAM}
    assert governor.interval_s() == SHORT_S
    machine.others = 1000
    turns(governor)
    assert machine.held == {RAM}  # once may be a flutter
    turns(governor)
    assert machine.held == set()
    assert [row["event"] for row in machine.events.rows()] == ["short", "shed", "released"]


def test_no_latch_where_room_is_only_just_enough() -> None:
    machine = Machine()
    machine.ledger.reserve("model:a", {(RAM, Purpose.KV): 4000})
    governor = machine.governor()
    machine.others = 5501
    turns(governor)
    assert machine.held == {RAM}
    machine.others = 5500  # no shortage, and nothing over
    turns(governor, RELEASE_TURNS - 1)
    assert machine.held == {RAM}
    turns(governor)
    assert machine.held == set()


def test_an_act_that_does_nothing_is_no_event_and_stops_nothing() -> None:
    machine = Machine(others=9999)
    governor = machine.governor(machine.act("caches", None), machine.act("last", None))
    turns(governor, 2)
    assert machine.called == ["caches", "last"] * 2
    assert [row["event"] for row in machine.events.rows()] == ["short"]


def test_the_clock_is_slow_while_idle() -> None:
    machine = Machine()
    governor = machine.governor()
    assert governor.interval_s() == BUSY_S
    machine.is_busy = False
    assert governor.interval_s() == IDLE_S


def test_a_turn_does_not_wait_for_the_threads_of_requests() -> None:
    machine = Machine()
    governor = machine.governor()
    over = threading.Event()

    async def body() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        costly = loop.run_in_executor(None, over.wait)
        try:
            async with asyncio.timeout(10):
                await governor.turn()
        finally:
            over.set()
            await costly

    asyncio.run(body())
    assert machine.reconciled == 1


def test_a_turn_that_fails_is_told_once_and_is_not_the_last(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.memory.governor.IDLE_S", 0.0)
    machine = Machine(is_busy=False)
    machine.failures = [ValueError("no such file"), ValueError("no such file"), OSError("other")]
    governor = machine.governor()

    async def body() -> None:
        watch = asyncio.ensure_future(governor.run())
        async with asyncio.timeout(10):
            while machine.reconciled < 2 and not watch.done():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        watch.cancel()
        await asyncio.wait([watch])
        assert watch.cancelled()

    with caplog.at_level(logging.ERROR):
        asyncio.run(body())
    told = [record.exc_info[1] for record in caplog.records if record.exc_info is not None]
    assert [repr(error) for error in told] == ["ValueError('no such file')", "OSError('other')"]


def test_events_are_bounded_and_counted() -> None:
    events = Events()
    for number in range(2000):
        events.add("drift", number=number)
    assert len(events.rows()) < 2000
    assert events.rows()[-1]["number"] == 1999
    assert events.counts == {"drift": 2000}
