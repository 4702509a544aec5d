"""The pool of request bytes: a floor that KV cannot take, waiting in order, nothing leaked."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import Overloaded
from penstock.memory.ledger import Ledger, Purpose
from penstock.memory.requests import BODY_FACTOR, RequestPool, floor_bytes

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
    assert floor_bytes(2 << 30) == 32 << 20
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
    with pytest.raises(Overloaded, match=r"server\.max_bodies"):
        await pool.share().grow(401)
    assert pool.waiting == 0


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
