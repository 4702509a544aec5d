"""KV that exists is not computed again: the same beginning, one after the other and at once."""

from __future__ import annotations

from penstock.testing.fake_kv import TOKEN_BYTES, FakeKv, absorb
from penstock.wire import Sampling, Submit
from penstock.worker.core.pacer import StepPacer
from penstock.worker.core.plan import Plan, StepLimits
from penstock.worker.core.scheduler import Scheduler

BLOCK = 4


def make(blocks: int = 40, tokens: int = 16) -> Scheduler:
    limits = StepLimits(tokens, 4, BLOCK, 8)
    return Scheduler(FakeKv(blocks, BLOCK, extent_blocks=1).cache, limits, StepPacer(None))


def request(number: int, prompt: list[int], max_tokens: int = 1, **more: object) -> Submit:
    sampling = Sampling(temperature=0)
    return Submit(number, prompt, max_tokens, sampling, **more)  # type: ignore[arg-type]


def computed(plan: Plan) -> dict[int, int]:
    return {piece.request_id: piece.count for piece in plan.slices}


def run(scheduler: Scheduler) -> list[dict[int, int]]:
    """Every step until nothing is left: tokens computed, by request."""
    steps = []
    while scheduler.has_work():
        plan = scheduler.plan()
        absorb(scheduler, plan, {p.request_id: 9 for p in plan.slices if p.samples}, 0.0)
        scheduler.check()
        steps.append(computed(plan))
    return steps


def test_the_next_turn_computes_only_what_is_new() -> None:
    scheduler = make()
    first = list(range(10))
    scheduler.add(request(0, first, max_tokens=4))
    run(scheduler)
    # The answer 9 9 9 was computed too, its last token was not: 13 tokens, three full blocks.
    scheduler.add(request(1, [*first, 9, 9, 9, 9, 50, 51]))
    assert run(scheduler) == [{1: 4}]


def test_the_last_token_is_computed_whatever_is_known() -> None:
    scheduler = make()
    scheduler.add(request(0, list(range(8)), max_tokens=2))
    run(scheduler)
    scheduler.add(request(1, list(range(8))))
    assert run(scheduler) == [{1: 4}]
    scheduler.add(request(2, list(range(8)), prompt_logprobs=0))  # needs a row for every token
    assert scheduler.plan().tokens == 4  # all rows of logits that there are beside sampling ones


def test_the_same_prompt_at_once_is_computed_once() -> None:
    scheduler = make(tokens=9)
    for number in range(3):
        scheduler.add(request(number, list(range(30)), max_tokens=2))
    steps = run(scheduler)
    assert [step.get(0) for step in steps[:4]] == [9, 9, 9, 3]
    assert sum(step.get(number, 0) for step in steps for number in (1, 2)) == 2 * (2 + 1)
    # Held once: seven blocks in common, and one each for the rest.
    scheduler.add(request(3, list(range(30)), max_tokens=2))
    scheduler.add(request(4, list(range(30)), max_tokens=2))
    scheduler.plan()
    assert scheduler._kv.held_bytes == (7 + 2) * BLOCK * TOKEN_BYTES


def test_a_short_stranger_does_not_wait_behind_one_that_follows() -> None:
    scheduler = make(tokens=9)
    scheduler.add(request(0, list(range(30))))
    scheduler.add(request(1, list(range(30))))
    scheduler.add(request(2, [77, 78, 79]))
    assert absorb(scheduler, scheduler.plan(), {}, 0.0) == {}
    plan = scheduler.plan()
    assert computed(plan) == {0: 9}  # the budget is the oldest one's
    scheduler.cancel(0)
    assert computed(scheduler.plan()) == {1: 9}  # goes on where the other stopped
    assert scheduler.oldest() is not None
    assert [step.get(2) for step in run(scheduler)].count(3) == 1


def test_with_room_for_both_the_follower_waits_and_the_stranger_runs() -> None:
    scheduler = make(tokens=40)
    scheduler.add(request(0, list(range(30))))
    scheduler.add(request(1, list(range(30))))
    scheduler.add(request(2, [77, 78, 79]))
    assert computed(scheduler.plan()) == {0: 30, 2: 3}


def test_another_salt_finds_nothing() -> None:
    scheduler = make()
    scheduler.add(request(0, list(range(12))))
    run(scheduler)
    scheduler.add(request(1, list(range(12)), salt=b"x"))
    assert run(scheduler) == [{1: 12}]
    scheduler.add(request(2, list(range(12)), salt=b"x"))
    assert run(scheduler) == [{2: 4}]


def test_the_end_of_what_was_used_longest_ago_goes_first() -> None:
    scheduler = make(blocks=7)
    scheduler.add(request(0, list(range(13))))  # four blocks, three of them full
    run(scheduler)
    scheduler.add(request(1, [60 + n for n in range(13)]))
    run(scheduler)
    assert scheduler._kv.evictable_bytes == 6 * BLOCK * TOKEN_BYTES
    scheduler.add(request(2, [80, 81, 82, 83, 84]))  # two blocks; one was free
    run(scheduler)
    assert scheduler._kv.evictions == 1
    scheduler.add(request(3, list(range(13))))
    assert run(scheduler) == [{3: 13 - 8}]


def test_who_gave_way_finds_its_own_again() -> None:
    scheduler = make(blocks=7)
    for _ in range(500):
        scheduler.lengths.observe(1)
    scheduler.add(request(0, list(range(8)), max_tokens=9))
    scheduler.add(request(1, [40 + n for n in range(11)], max_tokens=9))
    steps = run(scheduler)
    assert scheduler.preemptions == 1
    # Nineteen tokens once, and again no more than the block that was needed and the open one.
    assert 19 < sum(step.get(1, 0) for step in steps) <= 19 + 2 * BLOCK


def test_a_cleared_cache_finds_nothing_even_of_what_is_running() -> None:
    scheduler = make()
    scheduler.add(request(0, list(range(12)), max_tokens=20))
    absorb(scheduler, scheduler.plan(), {0: 9}, 0.0)
    scheduler._kv.clear()
    scheduler.add(request(1, list(range(12))))
    assert computed(scheduler.plan()) == {0: 1, 1: 12}
    run(scheduler)
