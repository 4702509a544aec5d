"""The line in front of a model: order, bounds, deadlines, and whether its promises hold."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import Overloaded
from penstock.server.queue import LOOK_AHEAD, Capacity, Lane

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
            "most_requests": 100,
            "most_bytes": 1 << 20,
            "deadline_s": 60.0,
            **limits,
        }
        self.lane = Lane("m", clock=self.clock, **settings)
        self.slots = slots
        self.held = False
        # So few are in the batch that there is never anything to look ahead to.
        self.lane.capacity = lambda: Capacity(
            self.lane.at_work - LOOK_AHEAD, self.slots, 1 << 40, held=self.held
        )
        self.started: list[str] = []
        self.stacks: dict[str, AsyncExitStack] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, name: str, key: str = "", priority: int = 0, tokens: int = 10) -> None:
        async def visit() -> None:
            with self.lane.visit(key, priority, 10) as visit:
                async with AsyncExitStack() as stack:
                    await stack.enter_async_context(visit.turn(tokens, tokens))
                    self.started.append(name)
                    done = asyncio.Event()
                    self.stacks[name] = stack.pop_all()
                    stack.callback(done.set)
                    self.ends[name] = done
                    try:
                        await done.wait()
                    finally:
                        await self.stacks[name].aclose()

        self.tasks.append(asyncio.create_task(visit()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    ends: dict[str, asyncio.Event]

    async def end(self, name: str) -> None:
        self.ends[name].set()
        for _ in range(5):
            await asyncio.sleep(0)
        self.lane.check()


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
                assert (bench.lane.waiting, bench.lane.at_work) == (0, 0)
                bench.lane.check()

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
        lane = Lane("m", most_requests=100, most_bytes=1 << 20, deadline_s=60)
        running = 0
        lane.capacity = lambda: Capacity(running, sequences=64, kv_bytes=1000)
        async with AsyncExitStack() as stack:
            visits = [stack.enter_context(lane.visit("", 0, 1)) for _ in range(20)]

            async def take(visit: Any) -> None:
                async with visit.turn(300, 1):
                    await asyncio.sleep(3600)

            tasks = [asyncio.create_task(take(visit)) for visit in visits]
            await asyncio.sleep(0.01)
            # Three whole ones fit; with nothing running yet, one more is looked ahead at.
            assert lane.at_work == max(3, LOOK_AHEAD)
            running = 4
            lane.pump()
            assert lane.at_work == 4 + LOOK_AHEAD
            lane.check()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(body())


@scenario(most_requests=2)
async def test_a_full_line_refuses_with_a_time(bench: Bench) -> None:
    for name in "abc":
        await bench.come(name)
    with pytest.raises(Overloaded, match=r"server\.queue_requests") as caught:
        bench.lane.visit("", 0, 1)
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s > 0
    await bench.end("a")
    await bench.come("d")
    assert bench.lane.waiting == 2


@scenario(most_bytes=25)
async def test_the_line_is_bounded_in_bytes_but_never_shut_to_one(bench: Bench) -> None:
    await bench.come("a")
    with ExitStack() as stack:
        stack.enter_context(bench.lane.visit("", 0, 1000))
        with pytest.raises(Overloaded, match=r"server\.queue_bytes"):
            bench.lane.visit("", 0, 1)


@scenario(deadline_s=0.02)
async def test_the_deadline_is_kept(bench: Bench) -> None:
    await bench.come("a")
    await bench.come("b")
    with pytest.raises(Overloaded, match=r"server\.queue_deadline_s"):
        await bench.tasks[1]
    assert bench.lane.waiting == 0
    assert not bench.tasks[0].done()


@scenario()
async def test_nobody_starts_while_the_governor_holds(bench: Bench) -> None:
    bench.held = True
    await bench.come("a")
    assert bench.started == []
    bench.held = False
    bench.lane.pump()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bench.started == ["a"]


@scenario()
async def test_who_gives_up_leaves_no_trace(bench: Bench) -> None:
    for name in "abc":
        await bench.come(name)
    bench.tasks[1].cancel()
    await asyncio.gather(bench.tasks[1], return_exceptions=True)
    assert [row["place"] for row in bench.lane.rows()] == [1]
    assert await run_all(bench) == ["a", "c"]
