"""Who ends when others need memory that is kept for slow clients."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from penstock.errors import Overloaded
from penstock.memory.clients import requests, waits
from penstock.memory.clients.json_weight import BODY_FACTOR
from penstock.memory.clients.requests import RequestPool
from penstock.memory.clients.waits import ClientWait, ClientWaits, Ended
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger
from penstock.testing.virtual_time import VirtualLoop

RATE = 100


@dataclass
class Memory:
    client: str
    size: int


@dataclass(frozen=True)
class Patience:
    rate: int = RATE
    grace_s: float = 300.0

    def left_s(self, waited_s: float, moved_bytes: int) -> float:
        return self.grace_s + moved_bytes / self.rate - waited_s


class Waiters:
    """Requests that wait for their clients, and those that were ended."""

    def __init__(self) -> None:
        self.waits = ClientWaits()
        self.ended: list[Ended] = []
        self.waits.on_end = self.ended.append
        self.memories: list[Memory] = []

    def waiting(self, client: str, size: int, waited_s: float = 60, moved: int = 0) -> None:
        memory = Memory(client, size)
        self.memories.append(memory)
        wait = ClientWait(memory, Patience(), self.waits)
        wait._before_s, wait.moved_bytes = waited_s, moved
        self.waits.waiting[wait] = None

    def make_way(self, client: str, size: int, needed: int | None = None) -> list[str]:
        held = Counter[str]()
        for memory in self.memories:
            held[memory.client] += memory.size
        self.waits.make_way(client, size, size if needed is None else needed, held)
        return [one.client for one in self.ended]


def test_the_slow_ones_that_keep_most_for_longest_end_first() -> None:
    waiters = Waiters()
    waiters.waiting("fast", 1000, waited_s=60, moved=60 * RATE)
    waiters.waiting("a", 700, waited_s=20)
    waiters.waiting("b", 710, waited_s=10)
    waiters.waiting("c", 690, waited_s=30)
    assert waiters.make_way("new", 900) == ["c", "a"]


def test_who_is_fast_enough_ends_only_for_somebody_smaller() -> None:
    waiters = Waiters()
    waiters.waiting("a", 500, moved=60 * RATE)
    assert waiters.make_way("new", 501) == []
    assert waiters.make_way("new", 400) == ["a"]


def test_nobody_fast_enough_within_an_equal_share_ends() -> None:
    waiters = Waiters()
    waiters.waiting("a", 100, moved=60 * RATE)
    waiters.waiting("b", 500, moved=60 * RATE)
    assert waiters.make_way("new", 300, needed=1000) == ["b"]


def test_slow_ones_have_no_share() -> None:
    waiters = Waiters()
    for number in range(60):
        waiters.waiting(f"slow {number}", 70, waited_s=20)
    assert len(waiters.make_way("new", 250)) == 4


def test_who_was_waited_for_only_for_a_moment_does_not_end() -> None:
    waiters = Waiters()
    waiters.waiting("a", 500, waited_s=1)
    assert waiters.make_way("new", 10) == []


def test_a_client_ends_none_of_its_own() -> None:
    waiters = Waiters()
    waiters.waiting("a", 500)
    assert waiters.make_way("a", 10) == []


def test_time_counts_only_while_the_client_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = VirtualLoop()
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=loop.time))

    async def run() -> None:
        wait = ClientWait(Memory("a", 1), Patience(grace_s=30), ClientWaits())
        for _ in range(2):
            async with wait.waiting():
                await asyncio.sleep(5)
            await asyncio.sleep(100)
        assert wait.waited_s == 10
        begun = loop.time()
        with pytest.raises(TimeoutError):
            async with wait.waiting():
                await asyncio.sleep(60)
        assert loop.time() - begun == 20
        assert not wait.ended

    task = loop.create_task(run())
    loop.advance(1000)
    task.result()
    loop.close()


def test_somebody_who_waits_for_memory_has_a_slow_one_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "PATIENCE_S", 0.05)
    monkeypatch.setattr(waits, "_SLOW_S", 0.1)

    async def run() -> None:
        pool = RequestPool(Ledger({RAM: 1600}), 100, 400 // BODY_FACTOR, patience_s=60.0)
        ended: list[Ended] = []
        pool.client_waits.on_end = ended.append

        async def slow() -> None:
            with pool.request_memory("slow") as memory:
                await memory.grow(350)
                wait = memory.waits(Patience())
                with pytest.raises(TimeoutError):
                    async with wait.waiting():
                        await asyncio.sleep(60)
                assert wait.ended

        task = asyncio.create_task(slow())
        await asyncio.sleep(0)
        with pool.request_memory("other") as memory:
            await memory.grow(200)
        await task
        [one] = ended
        assert (one.client, one.held_bytes, one.moved_bytes) == ("slow", 350, 0)
        assert one.waited_s >= 0.1
        pool.check()
        assert pool.used_bytes == 0

    asyncio.run(run())


def test_without_slow_clients_who_waits_gets_nothing_by_force() -> None:
    async def run() -> None:
        pool = RequestPool(Ledger({RAM: 1600}), 100, 400 // BODY_FACTOR, patience_s=0.2)
        with pool.request_memory("at work") as memory:
            await memory.grow(350)
            with pytest.raises(Overloaded):
                await pool.request_memory("other").grow(200)

    asyncio.run(run())
