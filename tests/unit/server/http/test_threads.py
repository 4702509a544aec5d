"""Work beside the event loop: who stands behind whom, and what a cancelled one waits for."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from penstock.server.http.threads import (
    INLINE_BYTES,
    build_grammar,
    run_in_thread_if_large,
    work_for,
)

LARGE = 8 << 20
MEDIUM = INLINE_BYTES + 1


def test_small_work_is_done_at_once() -> None:
    async def run() -> str:
        return await run_in_thread_if_large(INLINE_BYTES, lambda: threading.current_thread().name)

    assert asyncio.run(run()) == threading.current_thread().name


def test_large_bodies_do_not_stand_in_front_of_smaller_ones() -> None:
    gate = threading.Event()

    async def run() -> None:
        large = [asyncio.ensure_future(run_in_thread_if_large(LARGE, gate.wait)) for _ in range(16)]
        try:
            await asyncio.wait_for(run_in_thread_if_large(MEDIUM, lambda: None), 10)
            await asyncio.wait_for(asyncio.to_thread(lambda: None), 10)
        finally:
            gate.set()
            await asyncio.gather(*large)

    asyncio.run(run())


def test_clients_take_turns_whatever_one_has_in_line() -> None:
    gate, order = threading.Event(), list[str]()

    async def work(client: str, size: int) -> None:
        work_for(client)
        await run_in_thread_if_large(size, lambda: order.append(client if gate.wait(10) else ""))

    async def run() -> None:
        hog = [asyncio.ensure_future(work("hog", LARGE)) for _ in range(30)]
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(work(name, LARGE)) for name in "abc"]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*hog, *others)

    asyncio.run(run())
    # Two had begun, and each thread may have taken one more when the first of them ended.
    assert max(map(order.index, "abc")) < 10, order


def test_grammars_do_not_stand_in_front_of_bodies() -> None:
    gate = threading.Event()

    async def run() -> None:
        grammars = [asyncio.ensure_future(build_grammar(gate.wait)) for _ in range(16)]
        try:
            for size in (MEDIUM, LARGE):
                await asyncio.wait_for(run_in_thread_if_large(size, lambda: None), 10)
        finally:
            gate.set()
            await asyncio.gather(*grammars)

    asyncio.run(run())


def test_what_was_given_up_in_line_is_not_done() -> None:
    gate, done = threading.Event(), list[int]()

    async def run() -> None:
        first = [asyncio.ensure_future(build_grammar(gate.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        given_up = asyncio.ensure_future(build_grammar(lambda: done.append(1)))
        last = asyncio.ensure_future(build_grammar(lambda: done.append(2)))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*first, last)

    asyncio.run(run())
    assert done == [2]


def test_who_is_cancelled_waits_for_what_has_begun() -> None:
    gate, begun = threading.Event(), threading.Event()
    ended = []

    def work() -> None:
        begun.set()
        gate.wait(10)
        ended.append(True)

    async def run() -> None:
        task = asyncio.ensure_future(run_in_thread_if_large(LARGE, work))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended

    asyncio.run(run())


def test_what_fails_after_its_client_has_left_is_no_error_of_the_server() -> None:
    gate, begun = threading.Event(), threading.Event()
    complaints: list[object] = []

    def work() -> None:
        begun.set()
        gate.wait(10)
        raise ValueError

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        task = asyncio.ensure_future(run_in_thread_if_large(LARGE, work))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        await asyncio.sleep(0.05)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()

    asyncio.run(run())
    assert not complaints
