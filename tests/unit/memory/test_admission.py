"""Verdicts on requests and loads: what is granted, what waits for what, what can never fit."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest, ContextTooLong, ModelTooLarge
from penstock.memory.admission import (
    Accept,
    LoadNeed,
    ModelCapacity,
    Refuse,
    RequestNeed,
    Wait,
    decide,
    decide_growth,
    decide_load,
    granted_now,
    owner_of,
)
from penstock.memory.cost import GroupCost, KvCost
from penstock.memory.domains import RAM, Domain
from penstock.memory.eviction import ModelUsage
from penstock.memory.ledger import Ledger, Purpose

WINDOW = 1000
ROOM = ModelCapacity(
    name="m",
    domain=RAM,
    window=WINDOW,
    kv=KvCost((GroupCost(160),), 16),
    kv_now_bytes=160 * 50,  # 800 tokens
    fixed_bytes=1000,
)


def books(limit: int = 20_000, booked: int = 0) -> Ledger:
    ledger = Ledger({RAM: limit}, {RAM: 1 << 40})
    ledger.reserve("server", {(RAM, Purpose.PROCESS): 500})
    if booked:
        ledger.reserve(owner_of("other"), {(RAM, Purpose.WEIGHTS): booked})
    return ledger


def numbers(verdict: object) -> dict[str, object]:
    assert isinstance(verdict, Refuse)
    assert verdict.error.numbers is not None
    return verdict.error.numbers


def test_an_answer_is_cut_to_the_room() -> None:
    snapshot = books().snapshot()
    assert decide(RequestNeed(200, None), snapshot, ROOM) == Accept(600)
    assert decide(RequestNeed(200, 50), snapshot, ROOM) == Accept(50)
    assert decide(RequestNeed(799, 1), snapshot, ROOM) == Accept(1)
    whole = dataclasses.replace(ROOM, kv_now_bytes=1 << 30)
    assert decide(RequestNeed(200, 5000), snapshot, whole) == Accept(800)


def test_over_the_window_is_refused_whatever_the_memory() -> None:
    verdict = decide(RequestNeed(1000, None, "prompt"), books(1 << 30).snapshot(), ROOM)
    assert numbers(verdict) == {
        "reason": "window",
        "domain": "ram",
        "needed_tokens": 1001,
        "limit_tokens": 1000,
        "needed_bytes": 16 * 63 * 10,
        "limit_bytes": 10_080,
    }
    assert isinstance(verdict, Refuse)
    assert isinstance(verdict.error, ContextTooLong)
    assert verdict.error.param == "prompt"
    assert "1000 tokens" in verdict.error.message


def test_over_what_the_limit_can_ever_leave_is_refused_with_the_numbers() -> None:
    # 8000 - 500 of the server - 1000 of the model's own: 40 blocks of 160 bytes.
    snapshot = books(8000, booked=1000).snapshot()
    capacity = dataclasses.replace(ROOM, kv_now_bytes=3200)
    verdict = decide(RequestNeed(640, None), snapshot, capacity)
    assert numbers(verdict)["reason"] == "memory"
    assert numbers(verdict)["limit_tokens"] == 640
    assert numbers(verdict)["limit_bytes"] == 6400
    assert decide(RequestNeed(639, None), snapshot, capacity) == Wait(grow_bytes=6400)


def test_pinned_neighbours_are_not_counted_as_gone() -> None:
    snapshot = books(8000, booked=3000).snapshot()
    pinned = usage("other", fixed=1000, kv=2000, least=500, pinned=True)
    verdict = decide(RequestNeed(639, None), snapshot, ROOM, [pinned])
    assert isinstance(verdict, Accept)  # what is there counts too
    small = dataclasses.replace(ROOM, kv_now_bytes=1600)
    assert numbers(decide(RequestNeed(639, None), snapshot, small, [pinned]))["limit_tokens"] == (
        16 * ((8000 - 500 - 1000 - 1500) // 160)
    )


def test_external_memory_makes_a_request_wait_and_never_refuses_it() -> None:
    ledger = books(20_000)
    ledger.observe(RAM, 1 << 40)
    capacity = dataclasses.replace(ROOM, kv_now_bytes=1600)
    assert isinstance(decide(RequestNeed(500, None), ledger.snapshot(), capacity), Wait)


def test_an_absent_model_is_judged_by_window_and_weights_only() -> None:
    absent = dataclasses.replace(ROOM, kv_now_bytes=None)
    assert isinstance(decide(RequestNeed(900, None), books(20_000).snapshot(), absent), Accept)
    assert isinstance(decide(RequestNeed(900, None), books(8000).snapshot(), absent), Refuse)
    assert isinstance(decide(RequestNeed(680, None), books(8000).snapshot(), absent), Accept)
    # Not even the weights fit: that is the load's refusal, not the request's.
    assert isinstance(decide(RequestNeed(900, None), books(1000).snapshot(), absent), Accept)


def test_the_policy_may_refuse_an_answer_that_is_too_long() -> None:
    need = RequestNeed(900, 101, refuse_overlong_answer=True)
    whole = dataclasses.replace(ROOM, kv_now_bytes=1 << 30)
    verdict = decide(need, books().snapshot(), whole)
    assert isinstance(verdict, Refuse)
    assert type(verdict.error) is BadRequest
    assert decide(dataclasses.replace(need, max_tokens=100), books().snapshot(), whole) == (
        Accept(100)
    )


def test_a_lower_bound_says_that_it_is_one() -> None:
    verdict = decide(RequestNeed(2000, None, at_least=True), books().snapshot(), ROOM)
    assert isinstance(verdict, Refuse)
    assert "at least 2000" in verdict.error.message


def test_what_is_granted_now_may_be_nothing() -> None:
    assert granted_now(RequestNeed(700, None), ROOM) == 100
    assert granted_now(RequestNeed(900, None), ROOM) < 1


def usage(
    name: str,
    *,
    fixed: int = 100,
    kv: int = 1000,
    used: int = 0,
    least: int = 100,
    idle: bool = True,
    pinned: bool = False,
    used_at: float = 0.0,
) -> ModelUsage:
    return ModelUsage(name, RAM, fixed, kv, used, least, idle, pinned, used_at)


NEED = LoadNeed(
    name="new",
    domain=RAM,
    fixed={(RAM, Purpose.WEIGHTS): 900, (RAM, Purpose.STEP): 100},
    kv_min_bytes=100,
    kv_window_bytes=1000,
    kv_max_bytes=5000,
)


def loaded(limit: int, *usages: ModelUsage) -> Ledger:
    ledger = Ledger({RAM: limit}, {RAM: 1 << 40})
    for model in usages:
        needs = {(RAM, Purpose.WEIGHTS): model.fixed_bytes, (RAM, Purpose.KV): model.kv_bytes}
        ledger.reserve(owner_of(model.name), needs)
    return ledger


def test_a_load_gets_all_that_is_free_up_to_what_is_of_use() -> None:
    assert decide_load(NEED, loaded(4000).snapshot(), []) == Accept(3000)
    assert decide_load(NEED, loaded(40_000).snapshot(), []) == Accept(5000)
    assert decide_load(NEED, loaded(1100).snapshot(), []) == Accept(100)


def test_a_load_that_can_never_fit_is_refused_with_the_sum() -> None:
    verdict = decide_load(NEED, loaded(1099).snapshot(), [])
    assert isinstance(verdict, Refuse)
    assert isinstance(verdict.error, ModelTooLarge)
    assert numbers(verdict) == {
        "reason": "memory",
        "domain": "ram",
        "needed_bytes": 1100,
        "limit_bytes": 1099,
    }
    pinned = usage("p", pinned=True)
    assert isinstance(decide_load(NEED, loaded(1299, pinned).snapshot(), [pinned]), Refuse)
    assert not isinstance(decide_load(NEED, loaded(1300, pinned).snapshot(), [pinned]), Refuse)


def test_unused_kv_moves_before_a_model_is_unloaded() -> None:
    other = usage("other", kv=3000, used_at=1)
    ledger = loaded(4100, other)
    verdict = decide_load(NEED, ledger.snapshot(), [other])
    # 1000 are free and all of them are weights and step; a fair share of the 3000 is 1500, but one
    # window is enough.
    assert verdict == Wait(shed=(("other", 1000),))
    assert decide_load(NEED, ledger.snapshot(), [other], spent={"other"}) == Wait(unload=("other",))


def test_a_busy_neighbour_is_waited_for() -> None:
    other = usage("other", kv=3000, used=3000, idle=False)
    snapshot = loaded(3500, other).snapshot()
    assert decide_load(NEED, snapshot, [other]) == Wait(drain=("other",))
    # Not one that is pinned, nor one that was loaded only a moment ago.
    for kept in (
        dataclasses.replace(other, pinned=True, fixed_bytes=0, kv_min_bytes=0),
        dataclasses.replace(other, served=False),
    ):
        assert decide_load(NEED, snapshot, [kept]) == Wait()
    # Idle ones go with it, and those longest unused are asked first.
    others = [
        usage("late", kv=2000, used=2000, idle=False, used_at=2),
        usage("early", kv=2000, used=2000, idle=False, used_at=1),
        usage("idle", kv=100, used_at=3),
    ]
    snapshot = loaded(4600, *others).snapshot()
    assert decide_load(NEED, snapshot, others, spent={"idle"}) == Wait(drain=("early",))


def test_a_short_domain_takes_no_load() -> None:
    ledger = loaded(4000)
    ledger.observe(RAM, 1 << 40)
    assert isinstance(decide_load(NEED, ledger.snapshot(), []), Wait)


def test_growth_takes_what_is_free_then_from_idle_others() -> None:
    other = usage("other", kv=3000)
    ledger = loaded(3500, other)
    capacity = dataclasses.replace(ROOM, kv_now_bytes=0)
    assert decide_growth(ledger.snapshot(), capacity, 400, [other]) == Accept(400)
    assert decide_growth(ledger.snapshot(), capacity, 900, [other]) == Wait(shed=(("other", 500),))
    assert decide_growth(ledger.snapshot(), capacity, 900, [other], {"other"}) == (
        Wait(unload=("other",))
    )


@pytest.mark.parametrize("idle", [True, False])
def test_a_second_domain_must_have_room_too(idle: bool) -> None:
    ledger = Ledger({RAM: 1000, Domain.gpu(0): 10_000})
    other = usage("other", fixed=800, kv=0, least=0, idle=idle)
    ledger.reserve(owner_of("other"), {(RAM, Purpose.PROCESS): 800})
    need = dataclasses.replace(
        NEED,
        domain=Domain.gpu(0),
        fixed={(Domain.gpu(0), Purpose.WEIGHTS): 900, (RAM, Purpose.PROCESS): 300},
    )
    expected = Wait(unload=("other",)) if idle else Wait(drain=("other",))
    assert decide_load(need, ledger.snapshot(), [other]) == expected


@given(
    unit=st.integers(1, 3000),
    prompt=st.integers(1, 990),
    limit=st.integers(2_000, 40_000),
    overhead=st.integers(0, 500),
)
def test_kv_that_is_asked_for_is_enough_whatever_the_pieces(
    unit: int, prompt: int, limit: int, overhead: int
) -> None:
    """Otherwise a request waits for ever: the arena takes whole pieces only."""
    capacity = dataclasses.replace(ROOM, kv_now_bytes=0, overhead_bytes=overhead, unit_bytes=unit)
    verdict = decide(RequestNeed(prompt, 1), books(limit).snapshot(), capacity)
    if isinstance(verdict, Refuse):
        return
    assert isinstance(verdict, Wait)
    held = verdict.grow_bytes - verdict.grow_bytes % unit
    grown = dataclasses.replace(capacity, kv_now_bytes=held)
    assert decide(RequestNeed(prompt, 1), books(limit).snapshot(), grown) == Accept(1)


def test_a_load_elsewhere_takes_what_can_be_spared_before_anybody_goes() -> None:
    """Memory of a GPU model's process in RAM comes from KV kept there."""
    ledger = Ledger({RAM: 1000, Domain.gpu(0): 1000})
    ledger.reserve(owner_of("first"), {(RAM, Purpose.TIER): 950})
    tier = ModelUsage("tier", RAM, 0, 950, 0, 0, idle=True, pinned=True, used_at=float("-inf"))
    need = LoadNeed("m", Domain.gpu(0), {(RAM, Purpose.PROCESS): 200}, 10, 10, 10)
    assert decide_load(need, ledger.snapshot(), [tier]) == Wait(shed=(("tier", 150),))
