"""Places that are shared between callers."""

from __future__ import annotations

import asyncio

from penstock.server.pipeline.fairness import FairSlots


def test_callers_take_turns_whoever_came_first() -> None:
    served: list[str] = []

    async def visit(slots: FairSlots, caller: str) -> None:
        async with slots.place(caller):
            served.append(caller)
            await asyncio.sleep(0)

    async def run() -> None:
        slots = FairSlots(1)
        async with slots.place("x"):
            visits = [asyncio.ensure_future(visit(slots, caller)) for caller in "aaaab"]
            await asyncio.sleep(0)
            assert slots.waiting == 5
        await asyncio.gather(*visits)
        assert slots.waiting == 0

    asyncio.run(run())
    assert served == ["a", "b", "a", "a", "a"]


def test_who_leaves_the_line_takes_no_place_with_it() -> None:
    async def run() -> None:
        slots = FairSlots(1)
        async with slots.place("x"):
            waiting = [asyncio.ensure_future(_hold(slots)) for _ in range(3)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            await asyncio.sleep(0)
            assert slots.waiting == 2
        waiting[1].cancel()  # in the moment in which its turn has come
        await asyncio.gather(*waiting, return_exceptions=True)
        async with asyncio.timeout(1), slots.place("y"):
            pass

    asyncio.run(run())


async def _hold(slots: FairSlots) -> None:
    async with slots.place("a"):
        await asyncio.sleep(0)
