"""The scheduler: examples, and a state machine over pools so small that requests give way."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.testing.fake_kv import FakeKv, absorb
from penstock.testing.fake_proposers import Always
from penstock.wire import Finish, Reserve, Sampling, Submit, token_ids
from penstock.worker.core.drafts.drafting import Drafting
from penstock.worker.core.drafts.proposer import Proposal
from penstock.worker.core.pacer import StepPacer
from penstock.worker.core.plan import Plan, Slice, StepLimits
from penstock.worker.core.scheduler import FLOOR_TOKENS, Scheduler

if TYPE_CHECKING:
    from penstock.wire import TokenIds
    from penstock.worker.core.gate import StepShape
    from penstock.worker.core.sequence import Ended, Sequence

STOP_TOKEN = 7
GREEDY = Sampling(temperature=0)


class FakeGate:
    """A step costs its rows, twice its sequences and a tenth of its longest context."""

    def __init__(self) -> None:
        self.room = 1 << 30
        self.turned_away = False

    def cost(self, shape: StepShape) -> int:
        return shape.tokens + 2 * shape.sequences + shape.context // 10

    def admits(self, shape: StepShape) -> bool:
        fits = self.fits(shape)
        self.turned_away |= not fits
        return fits

    def fits(self, shape: StepShape) -> bool:
        return self.cost(shape) <= self.room


def make_scheduler(
    blocks: int = 8,
    block_tokens: int = 4,
    tokens: int = 16,
    sequences: int = 4,
    target_s: float | None = None,
    gate: FakeGate | None = None,
    reserve: Reserve = Reserve.EXPECTED,
) -> Scheduler:
    limits = StepLimits(tokens, sequences, block_tokens, 2 * sequences, reserve)
    kv = FakeKv(blocks, block_tokens, extent_blocks=1)
    return Scheduler(kv.cache, limits, StepPacer(target_s, floor_tokens=2), gate)


def submit(number: int, prompt: int, max_tokens: int, **more: object) -> Submit:
    """A prompt that has nothing in common with another's."""
    tokens = [100 + number] * prompt
    return Submit(number, tokens, max_tokens, GREEDY, **more)  # type: ignore[arg-type]


def expect_short_answers(scheduler: Scheduler) -> None:
    for _ in range(500):
        scheduler.lengths.observe(1)


def run_step(scheduler: Scheduler, token: int = 1) -> tuple[Plan, dict[int, Finish]]:
    plan = scheduler.plan()
    sampled = {piece.request_id: token for piece in plan.slices if piece.samples}
    return plan, ways(absorb(scheduler, plan, sampled, 0.0))


def ways(ended: dict[int, Ended]) -> dict[int, Finish]:
    return {number: each.how for number, each in ended.items()}


@dataclass(slots=True)
class Promise:
    """What a request must come to: its tokens so far, and the step it is finished by."""

    request: Submit
    finished_by: int
    generated: int = 0


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(1, 10),
        block_tokens=st.integers(1, 5),
        sequences=st.integers(1, 5),
        spare_tokens=st.integers(1, 12),
        target_s=st.none() | st.just(0.1),
        gated=st.booleans(),
        reserve=st.sampled_from(Reserve),
        short_answers=st.booleans(),
        windows=st.sampled_from([(None,), (None, 3), (None, 9), (4,), (None, 12, 5)]),
        commits_slowly=st.booleans(),
        drafts=st.sampled_from([0, 0, 1, 4]),
        state_bytes=st.sampled_from([0, 0, 8, 40, 300]),
    )
    def open(
        self,
        blocks: int,
        block_tokens: int,
        sequences: int,
        spare_tokens: int,
        target_s: float | None,
        gated: bool,
        reserve: Reserve,
        short_answers: bool,
        windows: tuple[int | None, ...],
        commits_slowly: bool,
        drafts: int,
        state_bytes: int,
    ) -> None:
        drafts = 0 if state_bytes else drafts
        self.gate = FakeGate() if gated else None
        self.may_preempt = reserve is Reserve.EXPECTED  # or the limit fell, or memory failed
        self.limits = StepLimits(
            tokens=sequences + spare_tokens,
            sequences=sequences,
            block_tokens=block_tokens,
            logit_rows=2 * sequences,
            reserve=reserve,
        )
        floor_tokens = 2
        # A gate leaves the oldest one token in a step full of others' decodes.
        self.min_chunk = 1 if gated else min(spare_tokens, floor_tokens, sequences)
        self.kv = FakeKv(
            blocks,
            block_tokens,
            windows=windows,
            extent_blocks=3 if len(windows) > 1 else 1,
            step_tokens=self.limits.tokens,
            commits_slowly=commits_slowly,
            state_bytes=state_bytes,
        )
        self.cache = self.kv.cache
        pacer = StepPacer(target_s, floor_tokens)
        drafting = Drafting([self], drafts, Always()) if drafts else None
        self.scheduler = Scheduler(self.cache, self.limits, pacer, self.gate, drafting)
        if short_answers:
            expect_short_answers(self.scheduler)
        self.promises: dict[int, Promise] = {}
        self.arrivals = 0
        self.steps = 0

    @rule(
        prompt=st.integers(1, 30),
        beginning=st.lists(st.sampled_from([1, 2]), max_size=3),
        max_tokens=st.integers(1, 15),
        min_tokens=st.integers(0, 4),
        prompt_logprobs=st.none() | st.just(0),
        salt=st.sampled_from([b"", b"", b"another key"]),
        priority=st.sampled_from([0, 0, 1]),
    )
    def add(
        self,
        prompt: int,
        beginning: list[int],
        max_tokens: int,
        min_tokens: int,
        prompt_logprobs: int | None,
        salt: bytes,
        priority: int,
    ) -> None:
        most = min(self.cache.max_tokens(), 60)
        if most < 2:
            return
        prompt = min(prompt, most - 1)
        request = submit(
            self.arrivals,
            prompt,
            min(max_tokens, most - prompt),
            min_tokens=min_tokens,
            stop_token_ids=[STOP_TOKEN],
            prompt_logprobs=prompt_logprobs,
            salt=salt,
            priority=priority,
        )
        request.prompt = (beginning + [1] * prompt)[:prompt]
        self.arrivals += 1
        # Whoever is oldest moves in every step: at the very worst all others wait for it, and it
        # computes everything anew. So nobody waits longer than for those before it, one by one.
        before = max((p.finished_by for p in self.promises.values()), default=self.steps)
        alone = self._steps_alone(request)
        for promise in self.promises.values():
            if promise.request.priority > priority:
                promise.finished_by += alone
        self.promises[request.id] = Promise(request, before + alone)
        self.scheduler.add(request)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.arrivals))
        assert self.scheduler.cancel(number) == (number in self.promises)
        self.promises.pop(number, None)

    @rule(full=st.booleans())
    def change_memory(self, full: bool) -> None:
        for memory in self.kv.all_memories:
            memory.full = full

    @rule()
    def return_memory(self) -> None:
        self.cache.compact()

    @rule(limit=st.integers(0, 1200))
    def move_limit(self, limit: int) -> None:
        self.may_preempt = True
        self.cache.set_limit(max(limit, self.cache.limit_for(self.scheduler.min_bytes())))
        self.scheduler.shrink()
        self.cache.trim()
        assert self.cache.committed_bytes <= self.cache.limit_bytes

    @rule()
    def clear_cache(self) -> None:
        self.cache.clear()
        assert self.cache.evictable_bytes == 0

    @precondition(lambda self: self.gate is not None)
    @rule(room=st.integers(0, 40))
    def change_room(self, room: int) -> None:
        assert self.gate is not None
        self.gate.room = room

    @precondition(lambda self: self.promises)
    @rule(
        data=st.data(),
        duration_s=st.sampled_from([0.01, 0.1, 1.0]),
        max_tokens=st.none() | st.integers(1, 8),
    )
    def step(self, data: st.DataObject, duration_s: float, max_tokens: int | None) -> None:
        if self.min_chunk > 1:
            max_tokens = None  # a step made smaller need not keep the pace of a whole one
        if self.gate is not None:
            self.gate.turned_away = False
        commits = self._commits()
        try:
            plan = self.scheduler.plan(max_tokens)
        except MemoryError:
            assert any(memory.full for memory in self.kv.all_memories)
            return
        commits = self._commits() - commits
        self._inspect(plan, max_tokens)
        if data.draw(st.booleans(), label="the step fails"):
            # Nothing was taken; the very same step can be planned again, unless memory has come
            # for one more sequence.
            again = self.scheduler.plan(max_tokens)
            assert commits or [(p.request_id, p.start, p.count) for p in again.slices] == [
                (p.request_id, p.start, p.count) for p in plan.slices
            ]
            return
        tokens = st.sampled_from([1, 2, STOP_TOKEN])
        sampled = {}
        for piece in plan.slices:
            if piece.samples:
                right = data.draw(st.integers(0, len(piece.drafts)), label="right drafts")
                sampled[piece.request_id] = [*piece.drafts[:right], data.draw(tokens)]
        self._finish_step(plan, sampled, duration_s)

    # A proposer, whose drafts may contain tokens at which answers end.
    name = "machine"

    def propose(self, number: int, tokens: TokenIds, most: int) -> Proposal | None:
        drafts = [(1, 2, 1, STOP_TOKEN)[(len(tokens) + n) % 4] for n in range(most)]
        return Proposal(drafts, [0.5] * most) if number % 4 else None

    def learn(self, number: int, proposal: Proposal, right: int, known: int) -> None:
        assert 0 <= right <= known <= len(proposal.tokens)

    def forget(self, number: int) -> None:
        assert number in self.promises

    def _commits(self) -> int:
        return sum(memory.commits for memory in self.kv.all_memories)

    @invariant()
    def books_agree(self) -> None:
        self.scheduler.check()
        assert self.scheduler.running + self.scheduler.waiting == len(self.promises)
        assert self.scheduler.has_work() == bool(self.promises)

    @invariant()
    def nobody_gives_way_who_was_promised_the_worst_case(self) -> None:
        assert self.may_preempt or self.scheduler.preemptions == 0

    @invariant()
    def nobody_starves(self) -> None:
        for number, promise in self.promises.items():
            assert self.steps < promise.finished_by, f"request {number} should be finished"

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.change_memory(full=False)
        while self.promises:
            if self.gate is not None:
                self.gate.turned_away = False
            plan = self.scheduler.plan()
            self._inspect(plan)
            self._finish_step(plan, {s.request_id: [1] for s in plan.slices if s.samples}, 0.1)
            self.books_agree()
            self.nobody_starves()
        assert self.cache.held_bytes == 0
        self.cache.clear()
        self.cache.check()

    def _steps_alone(self, request: Submit) -> int:
        """The most steps the oldest request can take from nothing."""
        size = len(request.prompt) + request.max_tokens
        return -(-size // self.min_chunk) + request.max_tokens

    def _inspect(self, plan: Plan, max_tokens: int | None = None) -> None:
        assert plan.slices, "there is work and the step is empty"
        assert plan.tokens == sum(piece.rows for piece in plan.slices) <= self.limits.tokens
        assert plan.tokens <= (max_tokens or plan.tokens)
        if self.gate is not None:
            alone = len(plan.slices) == 1 and plan.tokens <= FLOOR_TOKENS
            assert alone or self.gate.cost(plan.shape) <= self.gate.room
        assert len(plan.slices) <= self.limits.sequences
        assert sum(piece.logit_rows for piece in plan.slices) <= self.limits.logit_rows
        numbers = [piece.request_id for piece in plan.slices]
        assert len(numbers) == len(set(numbers)), "a sequence is in the step twice"
        for piece in plan.slices:
            sequence = self._sequence(piece.request_id)
            assert piece.count > 0
            assert piece.start == sequence.computed
            assert piece.end <= len(sequence.tokens)
            for table in piece.tables:
                assert piece.end_of_rows <= len(table) * self.limits.block_tokens
            assert piece.end_of_rows < sequence.max_tokens or not piece.drafts
        assert all(self._sequence(piece.request_id).decoding for piece in plan.decodes)
        # Whoever streams and still has its blocks streams on, however long others' prompts are.
        if max_tokens is None and not (self.gate and self.gate.turned_away):
            streaming = {s.id for s in self.scheduler._running if s.decoding}
            # One that gave way and found all of its KV again comes in as a chunk of one token.
            assert streaming <= {
                p.request_id for p in plan.slices if p in plan.decodes or p.count == 1
            }
        oldest = self.scheduler.oldest()
        assert oldest is not None and oldest.id in numbers, "the oldest request was not moved"

    def _sequence(self, number: int) -> Sequence:
        sequence = self.scheduler.find(number)
        assert sequence is not None
        return sequence

    def _finish_step(self, plan: Plan, sampled: dict[int, list[int]], duration_s: float) -> None:
        for piece in plan.slices:  # what the engine does with the rows of a prompt
            sequence = self._sequence(piece.request_id)
            if sequence.wants_prompt_logits:
                sequence.scored = min(piece.end + 1, sequence.prompt_tokens)
        ids = [piece.request_id for piece in plan.slices]
        truth = {number: list(self._sequence(number).tokens) for number in ids}
        salts = {number: self._sequence(number).request.salt for number in ids}
        self.kv.compute(plan, truth, salts)
        finished = ways(absorb(self.scheduler, plan, sampled, duration_s))
        expected: dict[int, Finish] = {}
        for number, tokens in sampled.items():
            promise = self.promises[number]
            for token in tokens:
                promise.generated += 1
                if token == STOP_TOKEN and promise.generated > promise.request.min_tokens:
                    expected[number] = Finish.STOP
                    break
                if promise.generated == promise.request.max_tokens:
                    expected[number] = Finish.LENGTH
                    break
            still = self.scheduler.find(number)
            assert still is None or still.generated == promise.generated
        assert finished == expected
        for number in finished:
            del self.promises[number]
        self.steps += 1


@pytest.mark.parametrize("seed", range(200))
def test_with_a_step_in_flight_every_row_sees_its_past(seed: int) -> None:
    """A step is planned before the tokens of the one before it are known, as on a GPU."""
    chance = Random(seed)
    blocks, size = chance.randint(4, 14), chance.randint(1, 4)
    windows = chance.choice([(None,), (None, 5), (6,), (None, 11, 3)])
    state_bytes = chance.choice([0, 16, 100])
    kv = FakeKv(blocks, size, windows=windows, step_tokens=9, state_bytes=state_bytes)
    scheduler = Scheduler(kv.cache, StepLimits(9, 4, size, 8), StepPacer(None))
    expect_short_answers(scheduler)
    truth: dict[int, list[int]] = {}
    flying: tuple[Plan, dict[int, list[int]]] | None = None
    for turn in range(120):
        if chance.random() < 0.3 and turn < 90:
            prompt = [chance.choice([1, 1, 2]) for _ in range(chance.randint(1, 3 * size))]
            prompt = (prompt + [1] * 40)[: chance.randint(1, size * blocks - 1)]
            most = min(chance.randint(1, 12), size * blocks - len(prompt))
            scheduler.add(Submit(turn, prompt, most, GREEDY, stop_token_ids=[STOP_TOKEN]))
            truth[turn] = list(prompt)
        if chance.random() < 0.05 and truth:
            scheduler.cancel(chance.choice(list(truth)))
        if chance.random() < 0.1:
            kv.cache.compact()
        plan = scheduler.plan()
        kv.compute(plan, truth, {})
        sampled = {
            p.request_id: [chance.choice([1, 2, STOP_TOKEN])] for p in plan.slices if p.samples
        }
        scheduler.advance(plan)
        for number, token in sampled.items():
            truth[number] += token
        if flying is not None:
            scheduler.absorb(*flying, 0.0)
        flying = (plan, sampled) if plan.slices else None
        scheduler.check()


@pytest.mark.parametrize("seed", range(60))
def test_states_go_back_after_a_step_that_failed(seed: int) -> None:
    """Behind some layers it fails, and what stands in the slots of its sequences is of no use."""
    chance = Random(seed)
    blocks, size = chance.randint(6, 20), chance.randint(1, 4)
    kv = FakeKv(blocks, size, step_tokens=9, state_bytes=chance.choice([8, 30, 200]))
    scheduler = Scheduler(kv.cache, StepLimits(9, 4, size, 8), StepPacer(None))
    expect_short_answers(scheduler)
    failures = 0
    for turn in range(100):
        if chance.random() < 0.3 and turn < 70:
            prompt = [chance.choice([1, 1, 2]) for _ in range(chance.randint(1, size * blocks - 1))]
            most = min(chance.randint(1, 12), size * blocks - len(prompt))
            scheduler.add(Submit(turn, prompt, most, GREEDY))
        plan = scheduler.plan()
        if plan.slices and chance.random() < 0.3:
            failures += 1
            kv.spoil_states(plan)
            scheduler.lose_states({piece.request_id for piece in plan.slices})
            scheduler.check()
            continue
        step(scheduler, kv, plan, late=set())
    while scheduler.has_work():
        step(scheduler, kv, scheduler.plan(), late=set())
    assert failures
    assert kv.cache.held_bytes == 0


def step(scheduler: Scheduler, kv: FakeKv, plan: Plan, late: set[int]) -> None:
    """Compute a plan and take its results."""
    known = {p.request_id: scheduler.find(p.request_id) for p in plan.slices}
    truth = {number: list(sequence.tokens) for number, sequence in known.items() if sequence}
    kv.compute(plan, truth, {})
    scheduler.advance(plan, late)
    sampled = {p.request_id: [1] for p in plan.slices if p.samples and p.request_id not in late}
    scheduler.absorb(plan, sampled, 0.0)
    scheduler.check()


def test_a_state_that_is_ahead_of_its_tokens_goes_back() -> None:
    """A mask that was late: the last row is computed once more, and must not count twice."""
    kv = FakeKv(30, 4, step_tokens=16, state_bytes=20)
    scheduler = Scheduler(kv.cache, StepLimits(16, 4, 4, 8), StepPacer(None))
    for number in (1, 2, 3):
        scheduler.add(submit(number, 10, 12))
    late = 0
    while scheduler.has_work():
        plan = scheduler.plan()
        samples = [piece.request_id for piece in plan.slices if piece.samples]
        late += bool(samples) and len(samples) > 1
        step(
            scheduler, kv, plan, late={samples[-1]} if len(samples) > 1 and late % 3 == 1 else set()
        )
    assert late > 3
    assert scheduler.preemptions > 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=40)


def test_a_prompt_is_computed_in_chunks_of_the_step() -> None:
    scheduler = make_scheduler(tokens=6)
    scheduler.add(submit(0, prompt=15, max_tokens=2))
    starts = [(p.start, p.count) for p in (run_step(scheduler)[0].slices[0] for _ in range(4))]
    assert starts == [(0, 6), (6, 6), (12, 3), (15, 1)]
    assert not scheduler.has_work()


def test_streams_decode_in_every_step_of_anothers_long_prompt() -> None:
    scheduler = make_scheduler(blocks=40, tokens=8)
    scheduler.add(submit(0, prompt=3, max_tokens=30))
    run_step(scheduler)
    scheduler.add(submit(1, prompt=60, max_tokens=1))
    while True:
        plan, finished = run_step(scheduler)
        assert [piece.request_id for piece in plan.decodes] == [0]
        assert plan.tokens <= 8
        if 1 in finished:
            break


def test_a_step_that_decodes_fill_leaves_a_new_prompt_for_the_next() -> None:
    """As after a step ran out of memory: the next ones have few tokens."""
    scheduler = make_scheduler(blocks=8, block_tokens=4, tokens=8, sequences=4)
    scheduler.add(submit(1, 1, 8))
    run_step(scheduler)
    scheduler.add(submit(2, 1, 8))
    plan = scheduler.plan(max_tokens=1)
    assert [piece.request_id for piece in plan.decodes] == [1]
    assert plan.chunks == []


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one() -> None:
    scheduler = make_scheduler(blocks=100, tokens=32)
    for number in (0, 1):
        scheduler.add(submit(number, prompt=120, max_tokens=1))
    run_step(scheduler)
    scheduler.add(submit(2, prompt=10, max_tokens=1))
    plan, finished = run_step(scheduler)
    assert 2 in finished
    assert {piece.request_id: piece.count for piece in plan.chunks} == {0: 16, 2: 10, 1: 6}


def test_the_oldest_prompt_has_all_that_others_do_not_need() -> None:
    scheduler = make_scheduler(blocks=100, tokens=32)
    scheduler.add(submit(0, prompt=120, max_tokens=1))
    scheduler.add(submit(1, prompt=5, max_tokens=1))
    plan, _ = run_step(scheduler)
    assert {piece.request_id: piece.count for piece in plan.chunks} == {0: 27, 1: 5}


def test_of_two_short_prompts_the_first_of_its_key_goes_first() -> None:
    scheduler = make_scheduler(blocks=100, tokens=32)
    scheduler.add(submit(0, prompt=120, max_tokens=1))
    for number, priority in ((1, 1), (2, 0)):
        request = submit(number, prompt=20, max_tokens=1)
        request.priority = priority
        scheduler.add(request)
    plan, _ = run_step(scheduler)
    assert {piece.request_id: piece.count for piece in plan.chunks} == {0: 16, 2: 16}


def test_the_youngest_gives_way_and_computes_its_tokens_again() -> None:
    scheduler = make_scheduler(blocks=5, block_tokens=4, tokens=16, sequences=3)
    expect_short_answers(scheduler)
    scheduler.add(submit(0, prompt=4, max_tokens=8))
    scheduler.add(submit(1, prompt=4, max_tokens=8))
    counts: dict[int, int] = {0: 0, 1: 0}
    while scheduler.has_work():
        plan = scheduler.plan()
        assert plan.slices[0].request_id == min(p.request_id for p in plan.slices)
        sampled = {p.request_id: 1 for p in plan.slices if p.samples}
        for number in sampled:
            counts[number] += 1
        absorb(scheduler, plan, sampled, 0.0)
        scheduler.check()
    assert scheduler.preemptions == 1
    assert counts == {0: 8, 1: 8}, "a token was sampled twice, or never"


def test_who_comes_behind_others_leaves_some_blocks_to_them() -> None:
    scheduler = make_scheduler(blocks=16, block_tokens=4, tokens=64, sequences=8)
    for number in range(4):  # each takes five blocks to its end
        scheduler.add(submit(number, prompt=16, max_tokens=4, priority=1))
    run_step(scheduler)
    assert (scheduler.running, scheduler.waiting) == (2, 2), "two of sixteen blocks are kept"
    scheduler.add(submit(9, prompt=4, max_tokens=4))
    plan, _ = run_step(scheduler)
    assert 9 in [piece.request_id for piece in plan.slices]
    scheduler.check()
    while scheduler.has_work():  # and the rest comes to its end
        run_step(scheduler)
        scheduler.check()


def test_who_comes_behind_others_has_all_blocks_while_it_is_alone() -> None:
    scheduler = make_scheduler(blocks=16, block_tokens=4, tokens=64)
    scheduler.add(submit(0, prompt=60, max_tokens=4, priority=1))
    plan, _ = run_step(scheduler)
    assert [piece.request_id for piece in plan.slices] == [0]


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    scheduler = make_scheduler(blocks=6, block_tokens=4, tokens=32)
    scheduler.add(submit(0, prompt=12, max_tokens=4))
    run_step(scheduler)
    scheduler.add(submit(1, prompt=16, max_tokens=4))  # does not fit beside the first
    scheduler.add(submit(2, prompt=1, max_tokens=1))  # would
    plan, _ = run_step(scheduler)
    assert [piece.request_id for piece in plan.slices] == [0]


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding"])
def test_cancel_frees_the_blocks_at_once(state: str) -> None:
    scheduler = make_scheduler(tokens=6)
    scheduler.add(submit(0, prompt=9, max_tokens=5))
    for _ in range({"waiting": 0, "prefilling": 1, "decoding": 3}[state]):
        run_step(scheduler)
    assert scheduler.cancel(0)
    scheduler.check()
    assert not scheduler.has_work()
    assert not scheduler.cancel(0)


def test_a_decode_of_several_tokens_is_as_many_rows() -> None:
    several = Slice(0, 4, token_ids([1, 2, 3]), (), 3, samples=True)
    plan = Plan(decodes=[several], chunks=[Slice(1, 0, token_ids([1, 2]), (), 0, samples=False)])
    assert plan.tokens == plan.shape.tokens == 5


def test_a_chunk_of_prompt_logprobs_leaves_a_row_to_everyone_who_samples() -> None:
    scheduler = make_scheduler(blocks=40, tokens=64, sequences=4)
    scheduler.add(submit(0, prompt=30, max_tokens=1, prompt_logprobs=0))
    for number in (1, 2, 3):
        scheduler.add(submit(number, prompt=3, max_tokens=1))
    plan = scheduler.plan()
    assert [piece.count for piece in plan.chunks] == [4, 3, 3, 3]
    assert sum(piece.logit_rows for piece in plan.slices) <= 8


def test_a_step_without_room_for_a_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="raise step_tokens or lower step_sequences"):
        make_scheduler(tokens=4, sequences=4)


def gated(room: int) -> tuple[Scheduler, FakeGate]:
    gate = FakeGate()
    gate.room = room
    return make_scheduler(blocks=100, tokens=64, gate=gate), gate


def test_a_chunk_shrinks_to_what_the_gate_admits() -> None:
    scheduler, gate = gated(room=40)
    scheduler.add(submit(0, prompt=100, max_tokens=1))
    plan = scheduler.plan()
    assert plan.tokens == 35  # 35 rows, 2 for the sequence, 3 for the context; 36 would make 41
    assert gate.cost(plan.shape) == 40


def test_alone_a_chunk_does_not_go_below_the_floor() -> None:
    scheduler, gate = gated(room=3)
    scheduler.add(submit(0, prompt=100, max_tokens=1))
    plan = scheduler.plan()
    assert plan.tokens == FLOOR_TOKENS and gate.cost(plan.shape) > gate.room


def test_the_youngest_sit_a_step_out_and_keep_their_blocks() -> None:
    scheduler, gate = gated(room=1000)
    for number in range(4):
        scheduler.add(submit(number, prompt=4, max_tokens=9))
    run_step(scheduler)
    gate.room = 7  # two rows and two sequences
    plan, _ = run_step(scheduler)
    assert [piece.request_id for piece in plan.decodes] == [0, 1]
    assert scheduler.preemptions == 0 and scheduler.running == 4
    gate.room = 1000
    plan, _ = run_step(scheduler)
    assert [piece.request_id for piece in plan.decodes] == [0, 1, 2, 3]


def test_decodes_leave_the_oldest_its_chunk() -> None:
    scheduler, gate = gated(room=1000)
    scheduler.add(submit(0, prompt=200, max_tokens=9))
    for number in (1, 2, 3):
        scheduler.add(submit(number, prompt=1, max_tokens=30))
    scheduler.plan(max_tokens=64)
    for _ in range(2):
        run_step(scheduler)
    gate.room = 40
    plan, _ = run_step(scheduler)
    assert 0 in [piece.request_id for piece in plan.chunks]


@pytest.mark.parametrize(("reserve", "together"), [(Reserve.EXPECTED, 3), (Reserve.WORST_CASE, 1)])
def test_how_many_join_depends_on_what_they_are_expected_to_come_to(
    reserve: Reserve, together: int
) -> None:
    scheduler = make_scheduler(blocks=12, block_tokens=4, tokens=64, reserve=reserve)
    expect_short_answers(scheduler)
    for number in range(3):
        scheduler.add(submit(number, prompt=8, max_tokens=30))
    scheduler.plan()
    assert scheduler.running == together


def test_a_smaller_limit_makes_the_youngest_give_way() -> None:
    cache = FakeKv(12, 4, extent_blocks=1).cache
    scheduler = Scheduler(cache, StepLimits(64, 4, 4, 8), StepPacer(None))
    for number in range(3):
        scheduler.add(submit(number, prompt=8, max_tokens=4))
    scheduler.plan()
    assert scheduler.running == 3
    cache.set_limit(cache.limit_for(scheduler.min_bytes()))
    scheduler.shrink()
    assert (scheduler.running, scheduler.waiting) == (1, 2)
    scheduler.check()


def launch(scheduler: Scheduler) -> tuple[Plan, dict[int, list[int]]]:
    """Plan a step and let it fly; what it will have sampled."""
    plan = scheduler.plan()
    sampled = {piece.request_id: [1] for piece in plan.slices if piece.samples}
    scheduler.advance(plan)
    scheduler.check()
    return plan, sampled


def test_a_step_is_planned_over_tokens_that_are_not_known_yet() -> None:
    scheduler = make_scheduler()
    scheduler.add(submit(1, 3, 3))
    flying = launch(scheduler)
    generated = []
    while scheduler.has_work():
        before, flying = flying, launch(scheduler)
        generated.append(flying[0].tokens)
        scheduler.absorb(*before, 0.0)
    # Two more rows, then nothing: the last token is on its way and needs no row of its own.
    assert generated == [1, 1, 0]


def test_an_answer_that_ends_in_flight_drops_what_was_launched_for_it() -> None:
    scheduler = make_scheduler()
    scheduler.add(submit(1, 3, 9, stop_token_ids=[STOP_TOKEN]))
    first, _ = launch(scheduler)
    second, _ = launch(scheduler)
    sequence = scheduler.find(1)
    assert sequence is not None
    assert ways(scheduler.absorb(first, {1: [STOP_TOKEN]}, 0.0)) == {1: Finish.STOP}
    assert scheduler.absorb(second, {1: [1]}, 0.0) == {}
    assert list(sequence.tokens[3:]) == [STOP_TOKEN]
    assert not scheduler.has_work()
    scheduler.check()


def test_who_gives_way_in_flight_comes_back_with_the_token() -> None:
    scheduler = make_scheduler(blocks=4)
    expect_short_answers(scheduler)
    scheduler.add(submit(1, 3, 12))
    scheduler.add(submit(2, 3, 12))
    flying = launch(scheduler)
    finished: dict[int, Finish] = {}
    for _ in range(40):
        before, flying = flying, launch(scheduler)
        finished |= ways(scheduler.absorb(*before, 0.0))
        scheduler.check()
    assert scheduler.preemptions > 0
    assert finished == {1: Finish.LENGTH, 2: Finish.LENGTH}


def test_who_is_late_computes_its_last_token_again_and_others_go_on() -> None:
    """A mask that was not there: nothing is sampled, and no block that others find is written."""
    scheduler = make_scheduler(blocks=16)
    scheduler.add(submit(1, 8, 5))  # whose prompt ends with a block
    scheduler.add(submit(2, 3, 5))
    plan = scheduler.plan()
    scheduler.advance(plan, {1})
    assert not scheduler.absorb(plan, {2: [0]}, 0.1)
    scheduler.check()
    late = scheduler.find(1)
    assert late is not None
    assert (late.computed, late.generated) == (7, 0)
    plan = scheduler.plan(held={1})
    assert [piece.request_id for piece in plan.slices] == [2]
    absorb(scheduler, plan, {2: 0}, 0.1)
    plan = scheduler.plan()
    assert {piece.request_id: (piece.start, piece.count) for piece in plan.slices} == {
        1: (7, 1),
        2: (4, 1),
    }
    absorb(scheduler, plan, {1: 0, 2: 0}, 0.1)
    scheduler.check()
    assert late.generated == 1
    for _ in range(2):
        plan = scheduler.plan(held={1})
        assert [piece.request_id for piece in plan.slices] == [2]
        absorb(scheduler, plan, {2: 0}, 0.1)
    assert not scheduler.plan(held={1}).slices
    assert scheduler.has_work()


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_memory_of_a_long_prompt_comes_beside_the_steps_of_others(
    windows: tuple[int | None, ...],
) -> None:
    kv = FakeKv(60, 4, windows=windows, extent_blocks=5, commits_slowly=True)
    limits = StepLimits(tokens=16, sequences=4, block_tokens=4, logit_rows=16)
    scheduler = Scheduler(kv.cache, limits, StepPacer(None))
    scheduler.add(submit(1, prompt=60, max_tokens=50))
    run_step(scheduler)
    assert scheduler.running == 1, "alone, it has its memory at once"
    scheduler.add(submit(2, prompt=100, max_tokens=4))
    before, steps = kv.memories[0].commits, 0
    while scheduler.waiting:
        plan, _ = run_step(scheduler)
        assert kv.memories[0].commits <= before + 1, "one extent a step"
        assert plan.slices
        before, steps = kv.memories[0].commits, steps + 1
    assert steps >= 100 // 4 // 5
    while scheduler.has_work():
        run_step(scheduler)
    kv.cache.check()
