"""A worker that is read to hold more than it was measured to: booked beside it, then let go."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.errors import ModelTooLarge, Overloaded, PenstockError
from penstock.memory.admission import LoadNeed
from penstock.memory.domains import RAM, Domain
from penstock.memory.ledger import Ledger, OutOfBudget, Purpose
from penstock.server.residency.memory_grant import MemoryGrant
from penstock.server.residency.ram_tier import RamTier
from penstock.wire import Freed, Grant

MIB = 1 << 20
LIMIT = 1000 * MIB
NEEDS = {
    (RAM, Purpose.PROCESS): 100 * MIB,
    (RAM, Purpose.WEIGHTS): 200 * MIB,
    (RAM, Purpose.STEP): 50 * MIB,
    (RAM, Purpose.KV): 400 * MIB,
}


def grant(ledger: Ledger, copied: int, committed: int) -> MemoryGrant:
    need = LoadNeed("m", RAM, {}, MIB, MIB, LIMIT)
    plan = SimpleNamespace(domain=RAM, load_need=lambda: need, kv_min_bytes=MIB)
    made = MemoryGrant(ledger, cast("Any", plan), ledger.reserve("model:m", NEEDS))
    made._client = cast(
        "Any",
        SimpleNamespace(
            ready=SimpleNamespace(copied_bytes=copied),
            status=SimpleNamespace(kv_committed_bytes=committed),
            open_requests=0,
        ),
    )
    return made


def test_what_was_measured_is_no_surprise_whether_weights_are_mapped_or_not() -> None:
    for copied in (0, 200 * MIB):
        ledger = Ledger({RAM: LIMIT})
        made = grant(ledger, copied, committed=300 * MIB)
        for _ in range(3):
            assert made.measured(100 * MIB + copied + 50 * MIB + 300 * MIB) <= 0
        assert made.drift_reserve_bytes == 0


def test_a_surprise_is_booked_once_two_readings_agree() -> None:
    ledger = Ledger({RAM: LIMIT})
    made = grant(ledger, 0, committed=300 * MIB)
    larger = 100 * MIB + 50 * MIB + 300 * MIB + 60 * MIB
    assert made.measured(larger) <= 0
    assert made.measured(larger) == 60 * MIB
    assert made.drift_reserve_bytes == 60 * MIB
    assert ledger.snapshot()[RAM].booked_bytes == 810 * MIB
    made.reset_drift_reserve()
    made.measured(larger - 60 * MIB)
    assert made.drift_reserve_bytes == 0
    assert ledger.snapshot()[RAM].booked_bytes == 750 * MIB
    ledger.check()


def test_where_the_books_are_full_kv_is_asked_for_first() -> None:
    ledger = Ledger({RAM: LIMIT})
    made = grant(ledger, 0, committed=300 * MIB)
    others = ledger.reserve("other", {(RAM, Purpose.KV): ledger.free(RAM)})
    larger = 100 * MIB + 50 * MIB + 300 * MIB + 60 * MIB
    made.measured(larger)
    made.measured(larger)
    assert (made.drift_reserve_bytes, made.unbooked_bytes) == (0, 60 * MIB)
    others.release()
    made.measured(larger)
    assert (made.drift_reserve_bytes, made.unbooked_bytes) == (60 * MIB, 0)


def test_what_the_driver_counts_is_booked_instead_of_the_estimate() -> None:
    ledger = Ledger({Domain.gpu(0): LIMIT, RAM: LIMIT})
    need = LoadNeed("m", Domain.gpu(0), {}, MIB, MIB, LIMIT)
    plan = SimpleNamespace(domain=Domain.gpu(0), load_need=lambda: need, kv_min_bytes=MIB)
    needs = {(Domain.gpu(0), purpose): size for (_, purpose), size in NEEDS.items()}
    needs[Domain.gpu(0), Purpose.KV] = 650 * MIB  # all of it
    made = MemoryGrant(ledger, cast("Any", plan), ledger.reserve("model:m", needs))
    ready = SimpleNamespace(
        weight_bytes=200 * MIB,
        overhead_bytes=30 * MIB,
        queue_bytes=20 * MIB,
        kept_bytes=0,
        graph_bytes=10 * MIB,
        device_overhead_bytes=180 * MIB,
        step_bytes=50 * MIB,
        kv_bytes=650 * MIB,
        kv_unit_bytes=1,
    )
    orders: list[Grant] = []

    def order(message: Grant) -> Future[None]:
        orders.append(message)
        return Future()

    made.book_measured(cast("Any", SimpleNamespace(ready=ready, order=order)))
    assert made.fixed_bytes == 440 * MIB
    assert orders == [Grant(560 * MIB, 50 * MIB)]
    assert ledger.snapshot()[Domain.gpu(0)].booked_bytes == LIMIT
    booked = ledger.snapshot()[RAM].purposes()
    assert (booked[Purpose.PROCESS], booked[Purpose.QUEUE]) == (10 * MIB, 20 * MIB)


@pytest.mark.parametrize(
    ("overhead", "refusal"), [(600 * MIB, Overloaded), (LIMIT + MIB, ModelTooLarge)]
)
def test_a_gpu_model_for_which_ram_is_full_is_refused_with_the_numbers(
    overhead: int, refusal: type[PenstockError]
) -> None:
    ledger = Ledger({Domain.gpu(0): LIMIT, RAM: LIMIT})
    ledger.reserve("other", {(RAM, Purpose.KV): 500 * MIB})
    need = LoadNeed("m", Domain.gpu(0), {}, MIB, MIB, LIMIT)
    card = SimpleNamespace(name="m")
    plan = SimpleNamespace(
        domain=Domain.gpu(0), load_need=lambda: need, kv_min_bytes=MIB, card=card
    )
    needs = {(Domain.gpu(0), Purpose.KV): 100 * MIB, (RAM, Purpose.PROCESS): 100 * MIB}
    made = MemoryGrant(ledger, cast("Any", plan), ledger.reserve("model:m", needs))
    ready = SimpleNamespace(
        weight_bytes=MIB,
        overhead_bytes=overhead,
        queue_bytes=0,
        kept_bytes=0,
        graph_bytes=0,
        device_overhead_bytes=0,
        step_bytes=0,
        kv_bytes=50 * MIB,
    )
    with pytest.raises(refusal, match=r"'m' holds \d+ bytes of ram") as caught:
        made.book_measured(cast("Any", SimpleNamespace(ready=ready)))
    assert type(caught.value) is refusal
    assert caught.value.numbers == {
        "reason": "memory",
        "domain": "ram",
        "needed_bytes": overhead - 100 * MIB,
        "limit_bytes": 400 * MIB,
    }


def test_kv_in_ram_is_booked_before_it_is_granted_and_until_it_is_back() -> None:
    ledger = Ledger({Domain.gpu(0): LIMIT, RAM: LIMIT})
    need = LoadNeed("m", Domain.gpu(0), {}, MIB, MIB, LIMIT)
    plan = SimpleNamespace(domain=Domain.gpu(0), load_need=lambda: need, kv_min_bytes=MIB)
    booking = ledger.reserve("model:m", {(Domain.gpu(0), Purpose.KV): 100 * MIB})
    made = MemoryGrant(ledger, cast("Any", plan), booking)
    ready = SimpleNamespace(kv_unit_bytes=1)
    sent: list[tuple[Grant, Future[Freed | None]]] = []

    def order(message: Grant) -> Future[Freed | None]:
        sent.append((message, Future()))
        return sent[-1][1]

    made._client = cast("Any", SimpleNamespace(ready=ready, order=order))
    tier = RamTier("m", made, 300 * MIB)
    tier.grow_kv(300 * MIB)
    assert ledger.snapshot()[RAM].purposes() == {Purpose.TIER: 300 * MIB}
    assert sent[-1][0] == Grant(100 * MIB, 0, 300 * MIB)
    with pytest.raises(OutOfBudget):
        tier.grow_kv(LIMIT + 1)
    # More to share with: it comes down, and the books fall with the worker's answer.
    RamTier("m", made, 100 * MIB).make_way()
    assert tier.usage().kv_bytes == 300 * MIB
    sent[-1][1].set_result(Freed(0, 100 * MIB, 160 * MIB))  # the rest is on its way to a disk
    assert tier.usage().kv_bytes == 160 * MIB
    assert made.granted_kv_bytes == 100 * MIB
    ledger.check()


def test_an_answer_counts_though_nobody_waits_for_it_any_more() -> None:
    async def run() -> None:
        ledger = Ledger({RAM: LIMIT})
        made = grant(ledger, 0, committed=0)
        answer: asyncio.Future[Freed | None] = asyncio.get_running_loop().create_future()
        cast("Any", made._client).order = lambda _: answer
        shrinking = asyncio.create_task(made.shrink(100 * MIB))
        await asyncio.sleep(0)
        shrinking.cancel()
        await asyncio.wait([shrinking])
        assert not answer.done()
        answer.set_result(Freed(300 * MIB, 100 * MIB, 0))
        await asyncio.sleep(0)
        assert made.kv_bytes == 100 * MIB

    asyncio.run(run())
