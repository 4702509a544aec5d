"""The books: both bounds, all or nothing, and giving back while a domain is short."""

from __future__ import annotations

import pytest

from penstock.memory.domains import RAM, Domain
from penstock.memory.ledger import Ledger, OutOfBudget, Purpose

RAM_KV = (RAM, Purpose.KV)
RAM_STEP = (RAM, Purpose.STEP)
GPU_KV = (Domain.gpu(0), Purpose.KV)


def test_a_reservation_is_all_or_nothing_over_domains() -> None:
    ledger = Ledger({RAM: 100, Domain.gpu(0): 50})
    ledger.reserve("a", {RAM_KV: 60})
    with pytest.raises(OutOfBudget) as caught:
        ledger.reserve("b", {GPU_KV: 50, RAM_KV: 41})
    assert caught.value.numbers == {
        "reason": "memory",
        "domain": "ram",
        "needed_bytes": 41,
        "limit_bytes": 40,
    }
    assert ledger.snapshot()[Domain.gpu(0)].booked_bytes == 0
    ledger.reserve("b", {GPU_KV: 50, RAM_KV: 40})
    ledger.check()


def test_two_reservations_of_one_owner_add_up() -> None:
    ledger = Ledger({RAM: 100})
    first = ledger.reserve("a", {RAM_KV: 10})
    second = ledger.reserve("a", {RAM_KV: 20, RAM_STEP: 5})
    assert ledger.snapshot()[RAM].owners == {"a": {Purpose.KV: 30, Purpose.STEP: 5}}
    first.release()
    first.release()
    assert ledger.snapshot()[RAM].owners == {"a": {Purpose.KV: 20, Purpose.STEP: 5}}
    assert ledger.snapshot()[RAM].purposes() == {Purpose.KV: 20, Purpose.STEP: 5}
    second.release()
    assert ledger.snapshot()[RAM].owners == {}
    ledger.check()


def test_a_resize_moves_between_purposes_without_room_to_spare() -> None:
    ledger = Ledger({RAM: 100})
    booking = ledger.reserve("a", {RAM_KV: 60, RAM_STEP: 40})
    booking.resize({RAM_KV: 100})
    with pytest.raises(OutOfBudget):
        booking.resize({RAM_KV: 101})
    assert booking.needs == {RAM_KV: 100}
    booking.mark_exiting()
    assert booking.needs == {(RAM, Purpose.EXITING): 100}
    booking.release()
    assert ledger.free(RAM) == 100


def test_a_short_domain_books_nothing_new_and_still_takes_back() -> None:
    ledger = Ledger({RAM: 100}, {RAM: 120}, {RAM: 10})
    booking = ledger.reserve("a", {RAM_KV: 60})
    ledger.observe(RAM, 60)
    state = ledger.snapshot()[RAM]
    assert state.short
    assert state.free_bytes == -10
    with pytest.raises(OutOfBudget, match="other programs"):
        ledger.reserve("b", {RAM_KV: 1})
    booking.resize({RAM_KV: 55})
    booking.resize({RAM_KV: 50, RAM_STEP: 5})  # no growth in sum
    with pytest.raises(OutOfBudget):
        booking.resize({RAM_KV: 51, RAM_STEP: 5})
    ledger.observe(RAM, 10)
    assert not ledger.snapshot()[RAM].short
    ledger.reserve("b", {RAM_KV: 45})  # the limit binds again


def test_a_snapshot_is_the_same_until_something_changes() -> None:
    ledger = Ledger({RAM: 100}, {RAM: 200})
    before = ledger.snapshot()
    assert ledger.snapshot() is before
    ledger.observe(RAM, 0)
    assert ledger.snapshot() is before
    booking = ledger.reserve("a", {RAM_KV: 5})
    after = ledger.snapshot()
    assert after is not before
    assert before[RAM].booked_bytes == 0
    booking.resize({RAM_KV: 5})
    assert ledger.snapshot() is after
    ledger.observe(RAM, 7)
    assert ledger.snapshot() is not after


def test_room_is_announced_when_bytes_come_back_or_a_bound_moves() -> None:
    ledger = Ledger({RAM: 100}, {RAM: 100})
    calls: list[int] = []
    ledger.on_room = lambda: calls.append(ledger.free(RAM))
    with ledger.reserve("a", {RAM_KV: 60}) as booking:
        booking.resize({RAM_KV: 50})
        ledger.observe(RAM, 30)
        ledger.observe(RAM, 10)
    assert calls == [50, 40, 90]
