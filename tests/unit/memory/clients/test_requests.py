"""The pool of request bytes: a floor that KV cannot take, fair waiting, nothing leaked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import BodyTooLarge, Overloaded
from penstock.memory.clients.json_weight import BODY_FACTOR, decoded_bytes
from penstock.memory.clients.requests import RequestPool, floor_bytes
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger, Purpose
from penstock.server.protocols.openai.chat import decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

FLOOR = 100
KEPT = 25  # beside it, for requests of at most 6
KEY = (RAM, Purpose.REQUESTS)


def pooled(
    test: Callable[[Ledger, RequestPool], Coroutine[Any, Any, None]],
) -> Callable[[], None]:
    def run() -> None:
        async def body() -> None:
            ledger = Ledger({RAM: 1600})
            pool = RequestPool(ledger, FLOOR, 400 // BODY_FACTOR, patience_s=0.05)
            await test(ledger, pool)
            assert pool.used_bytes == 0
            assert pool.waiting == 0
            pool.check()
            assert ledger.snapshot()[RAM].owners["requests"] == {Purpose.REQUESTS: FLOOR}
            ledger.check()

        asyncio.run(body())

    run.__name__ = test.__name__
    return run


def test_the_floor_follows_the_limit() -> None:
    assert floor_bytes(3 << 30) == 32 << 20
    assert floor_bytes(1 << 20) == 8 << 20
    assert floor_bytes(1 << 40) == 256 << 20


@pooled
async def test_kv_cannot_take_the_floor(ledger: Ledger, pool: RequestPool) -> None:
    kv = ledger.reserve("model:m", {(RAM, Purpose.KV): ledger.free(RAM)})
    with pool.request_memory() as memory:
        await memory.grow(FLOOR)
        with pytest.raises(Overloaded) as caught:
            await pool.request_memory().grow(7)
        assert caught.value.numbers is not None
        assert caught.value.numbers["needed_bytes"] == 7
    kv.release()


@pooled
async def test_beyond_the_floor_it_grows_and_gives_back(ledger: Ledger, pool: RequestPool) -> None:
    with pool.request_memory() as memory:
        await memory.grow(250)
        assert ledger.free(RAM) == 1350 - KEPT
        memory.shrink(200)
        assert ledger.free(RAM) == 1500 - KEPT


@pooled
async def test_more_than_the_most_is_refused_at_once(ledger: Ledger, pool: RequestPool) -> None:
    with pytest.raises(BodyTooLarge, match=r"server\.max_bodies"):
        await pool.request_memory().grow(401)
    with pool.request_memory() as memory:
        await memory.grow(300)
        with pytest.raises(BodyTooLarge):
            await memory.detached().grow(101)  # which it could never have beside the rest
    assert pool.waiting == 0


@pooled
async def test_a_turn_that_comes_with_the_deadline_is_not_lost(
    ledger: Ledger, pool: RequestPool
) -> None:
    first, second = pool.request_memory(), pool.request_memory()
    await first.grow(390)
    waiting = asyncio.create_task(second.grow(300))
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    # In the same turn of the loop as the deadline, and before it.
    time.sleep(0.06)  # noqa: ASYNC251 - so that both are due
    loop.call_soon(first.release)
    with contextlib.suppress(Overloaded):
        await waiting
    second.release()


@pooled
async def test_those_who_hold_all_of_it_do_not_wait_for_each_other(
    ledger: Ledger, pool: RequestPool
) -> None:
    one, other = pool.request_memory(), pool.request_memory()
    await one.grow(200)
    await other.grow(200)
    waiting = asyncio.create_task(one.grow(50))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await other.grow(50)  # at once: it is what the first waits for
    other.release()
    await waiting
    one.release()


@pooled
async def test_of_those_who_hold_all_of_it_the_one_that_holds_most_ends(
    ledger: Ledger, pool: RequestPool
) -> None:
    large, small = pool.request_memory("large"), pool.request_memory("small")
    await large.grow(300)
    await small.grow(90)
    first = asyncio.create_task(large.grow(50))
    await asyncio.sleep(0)
    second = asyncio.create_task(small.grow(50))
    with pytest.raises(Overloaded):
        await first
    large.release()
    await second
    small.release()


SHAPES = {
    "a long text": {"messages": [{"role": "user", "content": "word " * 20_000}]},
    "one character beyond Latin": {
        "messages": [{"role": "user", "content": "word " * 20_000 + "😀"}]
    },
    "short messages": {"messages": [{"role": "user", "content": "hi"}] * 5_000},
    "empty lists": {"messages": [], "chat_template_kwargs": {"a": [[]] * 20_000}},
    "empty objects": {"messages": [], "chat_template_kwargs": {"a": [{}] * 20_000}},
    "small objects": {"messages": [], "chat_template_kwargs": {"a": [{"a": 1}] * 20_000}},
    "keys": {"messages": [], "chat_template_kwargs": {str(i): 0 for i in range(20_000)}},
    "numbers": {"messages": [], "chat_template_kwargs": {"a": [257] * 20_000}},
    "strings": {"messages": [], "chat_template_kwargs": {"a": ["ab"] * 20_000}},
    "calls": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}] * 5_000}]
    },
    "lists in arguments": {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [
                    {"function": {"name": "f", "arguments": json.dumps({"a": [[]] * 20_000})}}
                ],
            }
        ]
    },
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_body_takes_no_more_than_is_booked_for_it(name: str, ascii_only: bool) -> None:
    body = json.dumps(SHAPES[name], separators=(",", ":"), ensure_ascii=ascii_only).encode()
    tracemalloc.start()
    try:
        fields = decoder.decode(body)
        if fields.messages:
            fields.conversation()
        taken = len(body) + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken <= decoded_bytes(body)


@pooled
async def test_what_has_begun_is_never_kept_waiting(ledger: Ledger, pool: RequestPool) -> None:
    kv = ledger.reserve("model:m", {(RAM, Purpose.KV): ledger.free(RAM) - 50})
    with pool.request_memory() as answer:
        answer.grow_now(FLOOR + 40)
        assert ledger.free(RAM) == 10
        answer.grow_now(100)  # more than there is
        ledger.check()
        with pytest.raises(Overloaded):
            await pool.request_memory().grow(7)  # but nobody new comes in
    kv.release()


async def _wait(pool: RequestPool, size: int, name: str, order: list[str]) -> None:
    with pool.request_memory(name) as memory:
        await memory.grow(size)
        order.append(name)
        await asyncio.sleep(0)


@pooled
async def test_a_small_one_passes_a_large_one(ledger: Ledger, pool: RequestPool) -> None:
    starved: list[int] = []
    pool.on_starved = starved.append
    first, order = pool.request_memory(), list[str]()
    await first.grow(370)
    tasks = [asyncio.create_task(_wait(pool, s, n, order)) for n, s in (("large", 300), ("s", 20))]
    await asyncio.sleep(0.01)
    assert order == ["s"]
    assert pool.waiting == 1
    assert starved == [300]
    first.release()
    await asyncio.gather(*tasks)


@pooled
async def test_a_large_one_is_not_passed_for_ever(ledger: Ledger, pool: RequestPool) -> None:
    order: list[str] = []
    others = [pool.request_memory() for _ in range(8)]
    for memory in others:
        await memory.grow(40)
    pool._patience_s = 60
    large = asyncio.create_task(_wait(pool, 300, "large", order))
    await asyncio.sleep(0)
    rounds = 0
    while not large.done():  # one always comes when one leaves
        oldest = others.pop(0)
        oldest.release()
        late = pool.request_memory()
        try:
            async with asyncio.timeout(0.01):
                await late.grow(40)
            others.append(late)
        except TimeoutError:
            rounds += 1
        await asyncio.sleep(0)
        assert rounds < 20
    for memory in others:
        memory.release()
    assert order == ["large"]
    assert rounds


@pooled
async def test_small_ones_pass_those_that_are_overdue(ledger: Ledger, pool: RequestPool) -> None:
    first = pool.request_memory()
    await first.grow(370)
    large = asyncio.create_task(pool.request_memory().grow(300))
    await asyncio.sleep(0)
    pool._waiters[0].passed_bytes = pool.max_bytes
    with pool.request_memory() as small:
        await small.grow(6)
        with pytest.raises(Overloaded):
            await pool.request_memory().grow(20)
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
    first.release()


@pooled
async def test_the_client_that_holds_least_is_next(ledger: Ledger, pool: RequestPool) -> None:
    hog, order = [pool.request_memory("hog") for _ in range(4)], list[str]()
    for memory in hog:
        await memory.grow(75)
    tasks = [
        asyncio.create_task(_wait(pool, 110, name, order))
        for name in ("hog", "hog", "hog", "guest")
    ]
    await asyncio.sleep(0)
    assert pool.waiting == 4
    hog[0].release()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order[0] == "guest"
    for memory in hog:
        memory.release()
    await asyncio.gather(*tasks)


@pooled
async def test_a_client_that_has_requests_leaves_something_to_others(
    ledger: Ledger, pool: RequestPool
) -> None:
    first, another = pool.request_memory("hog"), pool.request_memory("hog")
    await first.grow(250)
    with pytest.raises(Overloaded):
        await another.grow(60)
    with pool.request_memory("guest") as guest:
        await guest.grow(100)
    await another.grow(50)
    await first.grow(90)  # it has begun
    another.release()
    first.release()


@pooled
async def test_a_request_that_would_leave_others_too_little_holds_nobody_up(
    ledger: Ledger, pool: RequestPool
) -> None:
    first = pool.request_memory("hog")
    await first.grow(250)
    waiting = asyncio.create_task(pool.request_memory("hog").grow(60))
    await asyncio.sleep(0)
    pool._waiters[0].passed_bytes = pool.max_bytes
    with pool.request_memory("guest") as guest:
        await guest.grow(100)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    first.release()


@pooled
async def test_a_release_that_leaves_only_waiters_ends_one_of_them(
    ledger: Ledger, pool: RequestPool
) -> None:
    one, other, third = pool.request_memory(), pool.request_memory(), pool.request_memory()
    await one.grow(100)
    await other.grow(150)
    await third.grow(100)
    pool._patience_s = 60
    first = asyncio.create_task(one.grow(200))
    second = asyncio.create_task(other.grow(200))
    await asyncio.sleep(0)
    third.release()  # 250 are held, and each of those who hold them wants 200
    with pytest.raises(Overloaded):
        await second
    other.release()
    await first
    one.release()


@pooled
async def test_a_waiter_that_leaves_lets_the_next_one_in(ledger: Ledger, pool: RequestPool) -> None:
    first = pool.request_memory()
    await first.grow(390)
    leaver = asyncio.create_task(pool.request_memory().grow(300))
    await asyncio.sleep(0.01)
    leaver.cancel()
    await asyncio.gather(leaver, return_exceptions=True)
    with pool.request_memory() as memory:
        await memory.grow(5)
    first.release()


@pooled
async def test_a_crowd_that_waits_is_not_looked_through_for_nothing(
    ledger: Ledger, pool: RequestPool
) -> None:
    """A thousand who wait for more than there is would otherwise hold the event loop up."""
    looked: list[object] = []
    with pool.request_memory() as holder, pytest.MonkeyPatch.context() as monkey:
        await holder.grow(pool.max_bytes - 50)
        waiting = [asyncio.create_task(_wait(pool, 100, str(n), [])) for n in range(50)]
        await asyncio.sleep(0)
        assert pool.waiting == 50
        monkey.setattr(pool, "_serve", lambda *given: looked.append(given))
        for _ in range(10):
            pool.retry()
        assert looked == []
        monkey.undo()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
