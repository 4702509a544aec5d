"""The line in front of a model: order, bounds, deadlines, and whether its promises hold."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import Overloaded
from penstock.server.pipeline.fairness import OPEN_CALLERS, Callers, callers
from penstock.server.pipeline.queue import LOOK_AHEAD, Capacity, ModelQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A lane whose worker runs `slots` turns at once and never more."""

    def __init__(self, slots: int = 1, **limits: Any) -> None:
        self.clock = Clock()
        settings: dict[str, Any] = {
            "max_requests": 100,
            "max_bytes": 1 << 20,
            "deadline_s": 60.0,
            **limits,
        }
        self.queue = ModelQueue("m", clock=self.clock, **settings)
        self.slots = slots
        self.held = False
        # So few are in the batch that there is never anything to look ahead to.
        self.queue.capacity = lambda: Capacity(
            self.queue.at_work - LOOK_AHEAD, self.slots, 1 << 40, held=self.held
        )
        self.started: list[str] = []
        self.charges: dict[str, Callable[[int], None]] = {}
        self.stacks: dict[str, AsyncExitStack] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, name: str, key: str = "", priority: int = 0, tokens: int = 10) -> None:
        async def request() -> None:
            with self.queue.request(key, priority, 10) as queued:
                async with AsyncExitStack() as stack:
                    slot = queued.slot(tokens, tokens)
                    self.charges[name] = (await stack.enter_async_context(slot)).charge
                    self.started.append(name)
                    done = asyncio.Event()
                    self.stacks[name] = stack.pop_all()
                    stack.callback(done.set)
                    self.ends[name] = done
                    try:
                        await done.wait()
                    finally:
                        await self.stacks[name].aclose()

        self.tasks.append(asyncio.create_task(request()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    ends: dict[str, asyncio.Event]

    async def end(self, name: str, *, answered: bool = True) -> None:
        if answered:
            self.charges[name](0)
        self.ends[name].set()
        for _ in range(5):
            await asyncio.sleep(0)
        self.queue.check()


def scenario(
    **limits: Any,
) -> Callable[[Callable[[Bench], Coroutine[Any, Any, None]]], Callable[[], None]]:
    def wrap(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        def run() -> None:
            async def body() -> None:
                bench = Bench(**limits)
                bench.ends = {}
                try:
                    await test(bench)
                finally:
                    for task in bench.tasks:
                        task.cancel()
                    await asyncio.gather(*bench.tasks, return_exceptions=True)
                assert (bench.queue.waiting, bench.queue.at_work) == (0, 0)
                bench.queue.check()

            asyncio.run(body())

        run.__name__ = test.__name__
        return run

    return wrap


async def run_all(bench: Bench) -> list[str]:
    """End whoever is at work until nobody is left; the order in which they started."""
    ended = 0
    while ended < len(bench.started):
        await bench.end(bench.started[ended])
        ended += 1
    return bench.started


@scenario()
async def test_arrival_decides_among_equals(bench: Bench) -> None:
    for name in "abcd":
        await bench.come(name)
    assert await run_all(bench) == list("abcd")


@scenario()
async def test_a_lower_priority_number_goes_first(bench: Bench) -> None:
    await bench.come("first")
    await bench.come("late", priority=5)
    await bench.come("urgent", priority=-1)
    await bench.come("usual")
    assert await run_all(bench) == ["first", "urgent", "usual", "late"]


@scenario()
async def test_keys_take_turns_by_the_tokens_they_were_served(bench: Bench) -> None:
    for number in range(4):
        await bench.come(f"a{number}", key="a", tokens=100)
    for number in range(4):
        await bench.come(f"b{number}", key="b", tokens=50)
    order = await run_all(bench)
    # b begins where a is; from then on one of a's large ones for two of b's small ones.
    assert order == ["a0", "a1", "b0", "b1", "a2", "b2", "b3", "a3"]


@scenario()
async def test_priority_holds_within_a_key_only(bench: Bench) -> None:
    await bench.come("first", key="a")
    for number in range(3):
        await bench.come(f"a{number}", key="a", priority=5)
    await bench.come("urgent", key="a", priority=-100)
    await bench.come("b0", key="b", priority=100)
    await bench.come("b1", key="b", priority=100)
    assert await run_all(bench) == ["first", "urgent", "b0", "a0", "b1", "a1", "a2"]


@scenario()
async def test_fairness_counts_what_was_served_not_what_was_asked_for(bench: Bench) -> None:
    for number in range(4):
        await bench.come(f"a{number}", key="a", tokens=1)
        await bench.come(f"b{number}", key="b", tokens=1)
    order: list[str] = []
    while len(order) < 8:
        name = bench.started[len(order)]
        order.append(name)
        bench.charges[name](29 if name.startswith("a") else 9)
        await bench.end(name)
    assert order == ["a0", "b0", "b1", "b2", "a1", "b3", "a2", "a3"]


@scenario()
async def test_a_request_that_ends_before_its_first_token_was_served_nothing(bench: Bench) -> None:
    await bench.come("b0", key="b", tokens=10)
    await bench.come("a0", key="a", tokens=100)
    await bench.come("a1", key="a", tokens=10)
    await bench.come("b1", key="b", tokens=10)
    await bench.end("b0")
    assert bench.queue._served.of("a") == 110  # it began where b was
    await bench.end("a0", answered=False)
    assert bench.started == ["b0", "a0", "a1"]
    assert bench.queue._served.of("a") == 20


@scenario(slots=8, callers=lambda: Callers(2))
async def test_a_place_at_the_worker_is_left_for_another_key(bench: Bench) -> None:
    for number in range(20):
        await bench.come(f"a{number}", key="a", priority=-100)
    assert bench.queue.at_work == 7
    await bench.come("b0", key="b")
    assert bench.started[-1] == "b0"
    await bench.end("a0")
    assert bench.queue.at_work == 8, "who has a place no longer needs one kept"
    bench.queue.capacity = lambda: Capacity(running=8, sequences=8, kv_bytes=1 << 40)
    bench.queue.pump()
    assert bench.queue.at_work == 8, "whoever is given ahead would have the place of b0 next"
    await bench.end("b0")
    assert bench.queue.at_work == 7


@scenario(slots=8)
async def test_one_caller_has_all_places(bench: Bench) -> None:
    for number in range(20):
        await bench.come(f"a{number}")
    assert bench.queue.at_work == 8


@scenario(max_requests=16, callers=lambda: Callers(2))
async def test_one_key_cannot_fill_the_line(bench: Bench) -> None:
    await bench.come("at work", key="a")
    with ExitStack() as stack:
        waiting = 0
        with pytest.raises(Overloaded, match=r"14 of them of this client") as caught:
            for _ in range(20):
                stack.enter_context(bench.queue.request("a", -100, 1))
                waiting += 1
        assert waiting == 14
        assert caught.value.numbers is not None
        assert caught.value.numbers["waiting_of_key"] == 14
        for _ in range(2):
            stack.enter_context(bench.queue.request("b", 0, 1))
        with pytest.raises(Overloaded, match=r"2 of them of this client"):
            bench.queue.request("b", 0, 1)


def test_without_keys_callers_are_addresses() -> None:
    assert callers(3, local=False) == Callers(3)
    assert callers(0, local=True) == callers(1, local=True) == Callers(1)
    assert callers(0, local=False) == Callers(OPEN_CALLERS, anybody=True)


@scenario(slots=8, callers=lambda: callers(0, local=False))
async def test_without_keys_no_place_is_kept_for_an_address_that_is_not_there(bench: Bench) -> None:
    for number in range(20):
        await bench.come(f"a{number}", key="10.0.0.1")
    assert bench.queue.at_work == 8
    await bench.come("b0", key="10.0.0.2")
    assert bench.started[-1] == "b0", "who has none has the next"
    assert [slot.priority for slot in bench.queue._at_work] == [0, *[1] * 7, 0]
    for number in range(40):
        await bench.come(f"crowd {number}", key=f"10.0.1.{number}")
    assert bench.queue.at_work == OPEN_CALLERS + 7, "that is not so for a crowd of them"


@scenario(max_requests=256, callers=lambda: callers(0, local=False))
async def test_without_keys_one_address_cannot_fill_the_line(bench: Bench) -> None:
    with ExitStack() as stack:
        with pytest.raises(Overloaded, match=r"196 of them of this client"):
            for _ in range(256):
                stack.enter_context(bench.queue.request("10.0.0.1", 0, 1))
        for number in range(OPEN_CALLERS - 1):
            for _ in range(4):
                stack.enter_context(bench.queue.request(f"10.0.1.{number}", 0, 1))


@scenario(max_bytes=800, callers=lambda: Callers(2))
async def test_one_key_cannot_take_all_bytes(bench: Bench) -> None:
    with ExitStack() as stack:
        stack.enter_context(bench.queue.request("a", 0, 700))
        with pytest.raises(Overloaded, match=r"server\.queue_bytes"):
            bench.queue.request("a", 0, 1)
        stack.enter_context(bench.queue.request("b", 0, 60))
        stack.enter_context(bench.queue.request("b", 0, 40))
        with pytest.raises(Overloaded, match=r"server\.queue_bytes"):
            bench.queue.request("b", 0, 1)


@scenario()
async def test_who_comes_back_has_no_credit_from_before(bench: Bench) -> None:
    await bench.come("b0", key="b")
    for number in range(5):
        await bench.come(f"a{number}", key="a")
    await bench.end("b0")
    for number in range(2):
        await bench.end(f"a{number}")
    await bench.come("b1", key="b")
    await bench.come("b2", key="b")
    order = await run_all(bench)
    assert order.index("b1") < order.index("a4")
    assert order.index("b2") > order.index("a3")  # not both at once


@scenario(slots=3)
async def test_the_worker_gets_what_it_can_run(bench: Bench) -> None:
    for name in "abcde":
        await bench.come(name)
    assert bench.started == list("abc")
    await bench.end("b")
    assert bench.started == list("abcd")


def test_a_few_are_given_ahead_and_the_kv_is_counted() -> None:
    async def body() -> None:
        queue = ModelQueue("m", max_requests=100, max_bytes=1 << 20, deadline_s=60)
        running = 0
        queue.capacity = lambda: Capacity(running, sequences=64, kv_bytes=1000)
        async with AsyncExitStack() as stack:
            visits = [stack.enter_context(queue.request("", 0, 1)) for _ in range(20)]

            async def take(queued: Any) -> None:
                async with queued.slot(300, 1):
                    await asyncio.sleep(3600)

            tasks = [asyncio.create_task(take(queued)) for queued in visits]
            await asyncio.sleep(0.01)
            # Three whole ones fit; with nothing running yet, one more is looked ahead at.
            assert queue.at_work == max(3, LOOK_AHEAD)
            running = 4
            queue.pump()
            assert queue.at_work == 4 + LOOK_AHEAD
            queue.check()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(body())


@scenario(max_requests=2)
async def test_a_full_line_refuses_with_a_time(bench: Bench) -> None:
    for name in "abc":
        await bench.come(name)
    with pytest.raises(Overloaded, match=r"server\.queue_requests") as caught:
        bench.queue.request("", 0, 1)
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s > 0
    await bench.end("a")
    await bench.come("d")
    assert bench.queue.waiting == 2


@scenario(max_bytes=25)
async def test_the_line_is_bounded_in_bytes_but_never_shut_to_one(bench: Bench) -> None:
    await bench.come("a")
    with ExitStack() as stack:
        stack.enter_context(bench.queue.request("", 0, 1000))
        with pytest.raises(Overloaded, match=r"server\.queue_bytes"):
            bench.queue.request("", 0, 1)


@scenario(deadline_s=0.02)
async def test_the_deadline_is_kept(bench: Bench) -> None:
    await bench.come("a")
    await bench.come("b")
    with pytest.raises(Overloaded, match=r"server\.queue_deadline_s"):
        await bench.tasks[1]
    assert bench.queue.waiting == 0
    assert not bench.tasks[0].done()


@scenario()
async def test_what_is_left_of_a_request_has_the_deadline_from_its_last_progress(
    bench: Bench,
) -> None:
    """One of thousands of texts may come long after the first has ended."""
    await bench.come("a")
    with bench.queue.request("", 0, 10) as queued:
        bench.clock.now += 100
        with pytest.raises(Overloaded, match=r"server\.queue_deadline_s"):
            async with queued.slot(10, 10):
                pass
        queued.progressed()

        async def rest() -> None:
            async with queued.slot(10, 10):
                bench.started.append("rest")

        waiting = asyncio.create_task(rest())
        await asyncio.sleep(0.01)
        await bench.end("a")
        await waiting
    assert bench.started == ["a", "rest"]


@scenario()
async def test_nobody_starts_while_the_governor_holds(bench: Bench) -> None:
    bench.held = True
    await bench.come("a")
    assert bench.started == []
    bench.held = False
    bench.queue.pump()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bench.started == ["a"]


@scenario()
async def test_who_gives_up_leaves_no_trace(bench: Bench) -> None:
    for name in "abc":
        await bench.come(name)
    bench.tasks[1].cancel()
    await asyncio.gather(bench.tasks[1], return_exceptions=True)
    assert [place for place, _ in bench.queue.places().values()] == [1]
    assert await run_all(bench) == ["a", "c"]
