"""Drafts in plans: only where there is room that nobody else wants, and what is learned of them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from penstock.testing.fake_kv import FakeKv, absorb
from penstock.testing.fake_proposers import Always
from penstock.wire import Reserve, Sampling, Submit, token_ids
from penstock.worker.core.drafts.drafting import Drafting
from penstock.worker.core.drafts.proposer import Proposal
from penstock.worker.core.pacer import StepPacer
from penstock.worker.core.plan import Plan, StepLimits
from penstock.worker.core.scheduler import Scheduler

if TYPE_CHECKING:
    from penstock.wire import TokenIds
    from penstock.worker.core.gate import StepShape

GREEDY = Sampling(temperature=0)
DRAFTS = [1, 2, 3, 4, 5, 6, 7, 8]


class Constant:
    """The same drafts whatever there was; remembers what it was told."""

    name = "constant"

    def __init__(self, confidence: float = 0.9) -> None:
        self.confidence = confidence
        self.told: list[tuple[int, int]] = []
        self.asked: list[int] = []

    def propose(self, number: int, tokens: TokenIds, most: int) -> Proposal | None:
        self.asked.append(len(tokens))
        return Proposal(DRAFTS[:most], [self.confidence] * most)

    def learn(self, number: int, proposal: Proposal, right: int, known: int) -> None:
        self.told.append((right, known))

    def forget(self, number: int) -> None:
        pass


class Never(Always):
    def choose(self, survivals: object, streams: int, spare: int) -> list[int]:
        return []


class Gate:
    def __init__(self) -> None:
        self.rows = 1000
        self.rejected = False

    def admits(self, shape: StepShape) -> bool:
        self.rejected |= not self.fits(shape)
        return self.fits(shape)

    def fits(self, shape: StepShape) -> bool:
        return shape.tokens <= self.rows and shape.logit_rows <= self.rows


def make(
    blocks: int = 40,
    sequences: int = 4,
    most: int = 8,
    gate: Gate | None = None,
    control: Always | None = None,
    proposer: Constant | None = None,
    tokens: int = 32,
) -> tuple[Scheduler, Constant, FakeKv]:
    proposer = proposer or Constant()
    kv = FakeKv(blocks, 4, extent_blocks=1)
    limits = StepLimits(tokens, sequences, 4, StepLimits.logit_rows_for(sequences, most))
    drafting = Drafting([proposer], most, control or Always())
    return Scheduler(kv.cache, limits, StepPacer(None), gate, drafting), proposer, kv


def begin(scheduler: Scheduler, *requests: Submit) -> None:
    """Up to their first tokens."""
    for request in requests:
        scheduler.add(request)
    absorb(scheduler, scheduler.plan(), {request.id: 99 for request in requests})


def submit(number: int, prompt: int = 5, max_tokens: int = 50, **more: object) -> Submit:
    ids = token_ids([100 + number] * prompt)
    return Submit(number, ids, max_tokens, GREEDY, **more)  # type: ignore[arg-type]


def drafts(plan: Plan) -> list[list[int]]:
    return [list(piece.drafts) for piece in plan.decodes]


def test_what_was_right_is_computed_and_what_was_wrong_takes_no_block() -> None:
    scheduler, proposer, kv = make()
    begin(scheduler, submit(0))
    plan = scheduler.plan()
    assert drafts(plan) == [DRAFTS]
    assert plan.decodes[0].logit_rows == 9
    held = kv.cache.held_bytes
    absorb(scheduler, plan, {0: [1, 2, 50]})
    sequence = scheduler.find(0)
    assert sequence is not None
    assert list(sequence.tokens[5:]) == [99, 1, 2, 50]
    assert (sequence.computed, sequence.pending) == (8, 1)
    assert proposer.told == [(2, 3)]
    assert kv.cache.held_bytes < held
    assert sequence.kv.tables[0].count == 3  # 9 tokens in blocks of 4
    assert sequence.kv.known == 2
    scheduler.check()


def test_a_step_that_never_ran_leaves_no_block_with_a_draft() -> None:
    scheduler, _, kv = make()
    begin(scheduler, submit(0))
    before = kv.cache.held_bytes
    scheduler.plan()
    assert kv.cache.held_bytes > before
    scheduler.drafting.paused = True
    assert drafts(scheduler.plan()) == [[]]
    assert kv.cache.held_bytes == before


def test_there_are_no_more_drafts_than_tokens_to_come() -> None:
    scheduler, _, _ = make()
    begin(scheduler, submit(0, max_tokens=4), submit(1, max_tokens=2))
    plan = scheduler.plan()
    assert drafts(plan) == [DRAFTS[:2], []]
    absorb(scheduler, plan, {0: [1, 2, 3], 1: [5]})
    assert not scheduler.has_work()


def test_nothing_is_guessed_behind_a_token_that_ends_the_answer() -> None:
    scheduler, _, _ = make()
    begin(scheduler, submit(0, stop_token_ids=token_ids([4])))
    assert drafts(scheduler.plan()) == [[1, 2, 3]]


def test_an_answer_with_a_grammar_has_no_drafts() -> None:
    scheduler, proposer, _ = make()
    begin(scheduler, submit(0, grammar=b"a key"))
    assert drafts(scheduler.plan()) == [[]]
    assert not proposer.asked


def test_drafts_take_what_the_limits_leave_and_chunks_come_first() -> None:
    scheduler, _, _ = make(sequences=2, tokens=12)
    begin(scheduler, submit(0))
    scheduler.add(submit(1, prompt=40))
    plan = scheduler.plan()
    assert plan.chunk_tokens == 11
    assert drafts(plan) == [[]]
    scheduler.cancel(1)
    scheduler.add(submit(2, prompt=8))
    plan = scheduler.plan()
    assert plan.chunk_tokens == 8
    assert plan.tokens == 12 and drafts(plan) == [DRAFTS[:3]]


def test_drafts_of_all_share_the_rows_of_logits() -> None:
    scheduler, _, _ = make(sequences=4, most=3)
    begin(scheduler, *(submit(n, max_tokens=10) for n in range(4)))
    plan = scheduler.plan()
    assert sum(piece.logit_rows for piece in plan.slices) == 7  # of 8; one is not given away
    assert plan.drafts == 3


def test_the_gate_cuts_drafts_and_counts_none_as_turned_away() -> None:
    gate = Gate()
    scheduler, _, _ = make(gate=gate)
    begin(scheduler, submit(0), submit(1))
    gate.rows = 5
    plan = scheduler.plan()
    assert plan.drafts == 3
    assert not gate.rejected
    gate.rows = 1
    assert scheduler.plan().drafts == 0


def test_no_block_is_taken_for_a_draft_while_somebody_waits() -> None:
    scheduler, _, kv = make(blocks=4)
    begin(scheduler, submit(0, prompt=5, max_tokens=10))
    scheduler.add(submit(1, prompt=9, max_tokens=4))
    held = kv.cache.held_bytes
    plan = scheduler.plan()
    assert scheduler.waiting == 1
    assert drafts(plan) == [[1, 2]]  # to the end of its block
    assert kv.cache.held_bytes == held


def test_without_blocks_there_are_fewer_and_nobody_gives_way() -> None:
    scheduler, _, _ = make(blocks=4)
    for _ in range(500):
        scheduler.lengths.observe(1)
    begin(scheduler, submit(0, max_tokens=9), submit(1, max_tokens=9))
    for _ in range(2):
        plan = scheduler.plan()
        assert scheduler.preemptions == 0
        assert drafts(plan) == [[1, 2], [1, 2]]


def test_memory_that_fails_for_a_draft_costs_only_the_draft() -> None:
    scheduler, _, kv = make()
    begin(scheduler, submit(0))
    for memory in kv.memories:
        memory.full = True
    plan = scheduler.plan()
    assert [piece.request_id for piece in plan.decodes] == [0]
    assert drafts(plan) == [[]]
    scheduler.check()


def test_a_proposal_that_was_in_no_step_is_learned_from() -> None:
    scheduler, proposer, _ = make(control=Never())
    begin(scheduler, submit(0))
    for token in (1, 7):
        absorb(scheduler, scheduler.plan(), {0: token})
    assert proposer.told == [(1, 1), (0, 1)]
    assert scheduler.drafting.figures() == {"constant": (0, 0)}


def test_who_gets_none_is_tried_again_after_ever_longer() -> None:
    scheduler, _, _ = make(blocks=1000, control=Never(), proposer=Constant(0.01))
    begin(scheduler, submit(0, max_tokens=2000))
    tried = []
    for step in range(1, 1500):
        plan = scheduler.plan()
        if plan.drafts:
            assert drafts(plan) == [[1]]
            tried.append(step)
        absorb(scheduler, plan, {0: 9})
    waits = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert waits == [64, 128, 256, 512]
    assert tried[0] <= 33


def test_the_best_of_several_proposals_is_taken() -> None:
    doubtful, sure = Constant(0.2), Constant(0.8)
    sure.name = "sure"
    kv = FakeKv(40, 4, extent_blocks=1)
    drafting = Drafting([doubtful, sure], 3, Always())
    limits = StepLimits(32, 4, 4, 8, Reserve.EXPECTED)
    scheduler = Scheduler(kv.cache, limits, StepPacer(None), None, drafting)
    begin(scheduler, submit(0))
    absorb(scheduler, scheduler.plan(), {0: [1, 2, 3, 9]})
    assert drafting.figures() == {"constant": (0, 0), "sure": (3, 3)}
    assert (doubtful.told, sure.told) == ([], [(3, 3)])


@pytest.mark.parametrize("drafted", [False, True])
def test_the_pace_of_plain_decoding_is_not_that_of_steps_with_drafts(drafted: bool) -> None:
    pacer = StepPacer(0.1, floor_tokens=2)
    pacer.observe(1, 0, 0.02)
    pacer.observe(1, 100, 0.12)
    limit = pacer.chunk_limit(1)
    pacer.observe(1, 0, 0.07, drafts=15 if drafted else 0)
    assert (pacer.chunk_limit(1) == limit) == drafted
    # Rows of drafts beside a chunk are rows like its own.
    one, other = StepPacer(0.1, 2), StepPacer(0.1, 2)
    for some, prefill, drafts in ((one, 100, 0), (other, 85, 15)):
        some.observe(1, 0, 0.02)
        some.observe(1, prefill, 0.12, drafts)
    assert one.chunk_limit(1) == other.chunk_limit(1)
