"""The line under everything that can happen to it, in any order: nobody starves, bounds hold, and
whoever came is waiting, at work or gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.errors import Overloaded
from penstock.server.pipeline.fairness import Callers, ServedTokens, guaranteed, left_for
from penstock.server.pipeline.queue import Capacity, ModelQueue
from penstock.testing.virtual_time import VirtualLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.server.pipeline.queue import QueuedRequest, Slot

KEYS = ("a", "b", "c", "d")
MAX_REQUESTS = 16
MAX_BYTES = 1600


@dataclass(eq=False)
class Request:
    key: str
    priority: int
    size: int
    number: int
    release: asyncio.Future[None]
    task: asyncio.Task[None] | None = None
    charge: Callable[[int], None] | None = None  # while it is at work

    @property
    def waiting(self) -> bool:
        return self.charge is None and self.task is not None and not self.task.done()


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.requests: list[Request] = []
        self.wrongs: list[str] = []

    @initialize(sequences=st.integers(1, 12), keys=st.integers(1, len(KEYS)), anybody=st.booleans())
    def open(self, sequences: int, keys: int, anybody: bool) -> None:
        self.keys = KEYS[:keys]
        self.sequences = sequences
        self.running = 0
        self.held = False
        self.queue = ModelQueue(
            "m",
            max_requests=MAX_REQUESTS,
            max_bytes=MAX_BYTES,
            deadline_s=1e9,
            callers=lambda: Callers(keys, anybody=anybody),
            clock=self.loop.time,
        )
        self.start, self.queue._start = self.queue._start, self.judge  # type: ignore[method-assign]
        self.queue.capacity = lambda: Capacity(self.running, sequences, 1000, held=self.held)

    def teardown(self) -> None:
        for request in self.requests:
            assert request.task is not None
            request.task.cancel()
        self.loop.advance(0)
        if hasattr(self, "queue"):
            self.held = False
            self.queue.check()
            assert (self.queue.waiting, self.queue.at_work) == (0, 0)
            assert not self.queue._served._served, "an empty line remembers nothing"
        self.loop.close()
        asyncio.set_event_loop(None)

    def waiting(self, key: str | None = None) -> list[Request]:
        return [r for r in self.requests if r.waiting and key in (None, r.key)]

    def at_work(self) -> list[Request]:
        return [r for r in self.requests if r.charge is not None]

    @rule(
        key=st.integers(0, 3),
        priority=st.sampled_from((-100, 0, 0, 5)),
        size=st.sampled_from((1, 100, 400, 5000)),
        kv=st.sampled_from((10, 300)),
        prompt=st.integers(1, 50),
    )
    def arrive(self, key: int, priority: int, size: int, kv: int, prompt: int) -> None:
        name = self.keys[key % len(self.keys)]
        number = len(self.requests)
        request = Request(name, priority, size, number, self.loop.create_future())
        own = len(self.waiting(name))
        own_bytes = sum(r.size for r in self.waiting(name))
        try:
            queued = self.queue.request(name, priority, size)
        except Overloaded as error:
            assert error.retry_after_s is not None
            count = len(self.keys)
            enough = own >= max(1, guaranteed(MAX_REQUESTS, count))
            assert enough or own_bytes + size > guaranteed(MAX_BYTES, count), "no place for a key"
            assert own, "a key with nothing in the line was refused"
            return
        request.task = self.loop.create_task(self.stand(request, queued, kv, prompt))
        self.requests.append(request)
        self.loop.advance(0)

    async def stand(self, request: Request, queued: QueuedRequest, kv: int, prompt: int) -> None:
        with queued:
            async with queued.slot(kv, prompt) as place:
                request.charge = place.charge
                try:
                    await request.release
                finally:
                    request.charge = None

    def judge(self, slot: Slot) -> None:
        """Whether it is its turn, of those in the line."""
        queue, queued = self.queue, slot.queued
        served = queue._served.of(queued.key)
        for other in queue._waiting_slots():
            key = other.queued.key
            if key == queued.key:
                first = (queued.priority, slot.number) < (other.queued.priority, other.number)
                if not first:
                    self.wrongs.append("neither priority nor arrival decided within a key")
            elif not queue._places[key] and queue._served.of(key) < served:
                self.wrongs.append(f"{key} was served less and has no place")
        self.start(slot)

    @precondition(lambda self: self.at_work())
    @rule(which=st.integers(0, 99), tokens=st.integers(1, 20))
    def serve(self, which: int, tokens: int) -> None:
        work = self.at_work()
        request = work[which % len(work)]
        assert request.charge is not None
        before = self.queue._served.of(request.key)
        request.charge(tokens)
        assert self.queue._served.of(request.key) == before + tokens

    @precondition(lambda self: self.at_work())
    @rule(which=st.integers(0, 99))
    def finish(self, which: int) -> None:
        work = self.at_work()
        work[which % len(work)].release.set_result(None)
        self.loop.advance(0)

    @precondition(lambda self: self.waiting())
    @rule(which=st.integers(0, 99))
    def give_up(self, which: int) -> None:
        waiting = self.waiting()
        task = waiting[which % len(waiting)].task
        assert task is not None
        task.cancel()
        self.loop.advance(0)

    @rule(held=st.booleans())
    def step(self, held: bool) -> None:
        self.held = held
        self.running = min(len(self.at_work()), self.sequences)
        self.queue.pump()
        self.loop.advance(0)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert not self.wrongs, self.wrongs
        self.queue.check()
        assert self.queue.waiting == len(self.waiting())
        assert self.queue.at_work == len(self.at_work())
        places = [place for place, _ in self.queue.places().values()]
        assert places == list(range(1, self.queue.waiting + 1))
        first = Counter(
            {key: max(r.size for r in self.waiting(key)) for key in self.keys if self.waiting(key)}
        )
        waiting_bytes = sum(r.size for r in self.waiting())
        assert waiting_bytes <= MAX_BYTES + first.total(), "bytes beyond one request for each key"


@pytest.mark.hypothesis
def test_the_line() -> None:
    run_state_machine_as_test(
        World,
        settings=settings(stateful_step_count=60),
    )


@given(
    total=st.integers(1, 300),
    orders=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=200),
)
def test_every_key_finds_its_part_whatever_others_take(
    total: int, orders: list[tuple[int, int]]
) -> None:
    keys = 6
    each = guaranteed(total, keys)
    held: Counter[str] = Counter()
    for number, size in orders:
        key = str(number)
        if size <= left_for(key, total, held, each, keys):
            held[key] += size
        else:
            assert held[key] + size > each
        assert held.total() <= total
    for number in range(keys):
        key = str(number)
        if held[key] < each:
            assert left_for(key, total, held, each, keys) >= each - held[key]


def test_one_key_alone_may_use_most_of_it() -> None:
    for keys in (2, 5, 20):
        assert left_for("a", 400, {}, guaranteed(400, keys), keys) >= 300
    assert left_for("a", 400, {}, guaranteed(400, 1), 1) == 400


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(("enter", "leave", "charge")),
            st.integers(0, 50),
        ),
        max_size=100,
    )
)
def test_leaving_and_coming_back_pays_no_debt(acts: list[tuple[str, str, int]]) -> None:
    served = ServedTokens()
    here: Counter[str] = Counter()
    owed: dict[str, int] = {}  # beyond the least of those here, when it left
    for key, act, tokens in acts:
        if act == "enter":
            others = [served.of(k) for k in here if here[k]]
            served.enter(key)
            here[key] += 1
            if here[key] == 1 and others:
                assert served.of(key) >= min(others)
                assert served.of(key) >= owed.get(key, 0)
        elif here[key] and act == "leave":
            owed[key] = served.of(key)
            served.leave(key)
            here[key] -= 1
            if not here.total():
                owed.clear()
        elif here[key]:
            served.charge(key, tokens)
        served.check()
