"""The pool of request bytes: a floor that KV cannot take, waiting in order, nothing leaked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import BodyTooLarge, Overloaded
from penstock.memory.ledger import Ledger, Purpose
from penstock.memory.requests import BODY_FACTOR, RequestPool, decoded_bytes, floor_bytes
from penstock.server.api.chat import decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

FLOOR = 100
KEY = ("ram", Purpose.REQUESTS)


def pooled(
    test: Callable[[Ledger, RequestPool], Coroutine[Any, Any, None]],
) -> Callable[[], None]:
    def run() -> None:
        async def body() -> None:
            ledger = Ledger({"ram": 1600})
            pool = RequestPool(ledger, FLOOR, 400 // BODY_FACTOR, patience_s=0.05)
            await test(ledger, pool)
            assert pool.used_bytes == 0
            assert pool.waiting == 0
            assert ledger.snapshot()["ram"].owners["requests"] == {Purpose.REQUESTS: FLOOR}
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
    kv = ledger.reserve("model:m", {("ram", Purpose.KV): ledger.free("ram")})
    with pool.share() as share:
        await share.grow(FLOOR)
        with pytest.raises(Overloaded) as caught:
            await pool.share().grow(1)
        assert caught.value.numbers is not None
        assert caught.value.numbers["needed_bytes"] == 1
    kv.release()


@pooled
async def test_beyond_the_floor_it_grows_and_gives_back(ledger: Ledger, pool: RequestPool) -> None:
    with pool.share() as share:
        await share.grow(250)
        assert ledger.free("ram") == 1350
        share.shrink(200)
        assert ledger.free("ram") == 1500


@pooled
async def test_more_than_the_most_is_refused_at_once(ledger: Ledger, pool: RequestPool) -> None:
    with pytest.raises(BodyTooLarge, match=r"server\.max_bodies"):
        await pool.share().grow(401)
    with pool.share() as share:
        await share.grow(300)
        with pytest.raises(BodyTooLarge):
            await share.apart().grow(101)  # which it could never have beside the rest
    assert pool.waiting == 0


@pooled
async def test_a_turn_that_comes_with_the_deadline_is_not_lost(
    ledger: Ledger, pool: RequestPool
) -> None:
    first, second = pool.share(), pool.share()
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
    one, other = pool.share(), pool.share()
    await one.grow(200)
    await other.grow(200)
    waiting = asyncio.create_task(one.grow(50))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await other.grow(50)  # at once: it is what the first waits for
    other.release()
    await waiting
    one.release()


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
    kv = ledger.reserve("model:m", {("ram", Purpose.KV): ledger.free("ram") - 50})
    with pool.share() as answer:
        answer.grow_now(FLOOR + 40)
        assert ledger.free("ram") == 10
        answer.grow_now(100)  # more than there is
        ledger.check()
        with pytest.raises(Overloaded):
            await pool.share().grow(1)  # but nobody new comes in
    kv.release()


@pooled
async def test_waiters_are_served_in_order(ledger: Ledger, pool: RequestPool) -> None:
    starved: list[int] = []
    pool.on_starved = starved.append
    first, order = pool.share(), []
    await first.grow(390)

    async def wait(name: str, size: int) -> None:
        with pool.share() as share:
            await share.grow(size)
            order.append(name)

    tasks = [asyncio.create_task(wait(n, s)) for n, s in (("large", 300), ("small", 1))]
    await asyncio.sleep(0.01)
    assert order == []  # the small one does not pass the large one
    assert pool.waiting == 2
    assert starved == [300, 301]
    first.release()
    await asyncio.gather(*tasks)
    assert order == ["large", "small"]


@pooled
async def test_a_waiter_that_leaves_lets_the_next_one_in(ledger: Ledger, pool: RequestPool) -> None:
    first = pool.share()
    await first.grow(390)
    leaver = asyncio.create_task(pool.share().grow(300))
    await asyncio.sleep(0.01)
    leaver.cancel()
    await asyncio.gather(leaver, return_exceptions=True)
    with pool.share() as share:
        await share.grow(5)
    first.release()
