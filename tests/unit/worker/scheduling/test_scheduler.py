"""The scheduler: examples, and a state machine over pools so small that requests give way."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.wire import Finish, Reserve, Sampling, Submit
from penstock.worker.kv.blocks import BlockPool
from penstock.worker.scheduling.plan import Plan, StepLimits
from penstock.worker.scheduling.policy import StepPacer
from penstock.worker.scheduling.scheduler import FLOOR_TOKENS, Scheduler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.worker.scheduling.gate import StepShape
    from penstock.worker.scheduling.sequence import Sequence

STOP_TOKEN = 7
GREEDY = Sampling(temperature=0)


class FakeMemory:
    """Fails every commit while `full`."""

    full = False

    def commit(self, extent: int) -> None:
        if self.full:
            raise MemoryError

    def decommit(self, extent: int) -> None:
        pass


class FakeGate:
    """A step costs its rows, twice its sequences and a tenth of its longest context."""

    def __init__(self) -> None:
        self.room = 1 << 30
        self.turned_away = False

    def cost(self, shape: StepShape) -> int:
        return shape.tokens + 2 * shape.sequences + shape.context // 10

    def admits(self, shape: StepShape) -> bool:
        fits = self.cost(shape) <= self.room
        self.turned_away |= not fits
        return fits


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
    return Scheduler(
        BlockPool(blocks + 1, 2, FakeMemory()), limits, StepPacer(target_s, floor_tokens=2), gate
    )


def submit(number: int, prompt: int, max_tokens: int, **more: object) -> Submit:
    """A prompt that has nothing in common with another's."""
    tokens = [100 + number] * prompt
    return Submit(number, tokens, max_tokens, GREEDY, **more)  # type: ignore[arg-type]


def expect_short_answers(scheduler: Scheduler) -> None:
    for _ in range(500):
        scheduler.lengths.observe(1)


def run_step(scheduler: Scheduler, token: int = 1) -> tuple[Plan, dict[int, Finish]]:
    plan = scheduler.plan()
    sampled = {piece.sequence.id: token for piece in plan.slices if piece.samples}
    return plan, scheduler.absorb(plan, sampled, 0.0)


@dataclass(slots=True)
class Promise:
    """What a request must come to: its tokens so far, and the step it is finished by."""

    request: Submit
    finished_by: int
    generated: int = 0


class FakeKv:
    """What lies in each slot of each block: a hash of everything up to that token."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._slots: dict[tuple[int, int], int] = {}

    def compute(self, plan: Plan, truth: Mapping[int, list[int]] | None = None) -> None:
        """Every token sees the right past, whoever computed it, and adds its own; `truth` has
        tokens that the scheduler does not know yet."""
        for piece in plan.slices:
            tokens = piece.sequence.tokens if truth is None else truth[piece.sequence.id]
            state = hash(piece.sequence.request.salt)
            for position, token in enumerate(tokens[: piece.end]):
                state = hash((state, token))
                place = self._place(piece.sequence, position)
                if position < piece.start:
                    assert self._slots.get(place) == state, "another's past, or none"
                else:  # nobody in the step reads what another writes in it
                    self._slots[place] = state

    def move(self, moves: dict[int, int]) -> None:
        for (block, slot), state in list(self._slots.items()):
            if block in moves:
                self._slots[moves[block], slot] = state

    def _place(self, sequence: Sequence, position: int) -> tuple[int, int]:
        index, slot = divmod(position, self._block_tokens)
        return sequence.blocks[index], slot


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
    ) -> None:
        self.gate = FakeGate() if gated else None
        self.may_preempt = reserve is Reserve.EXPECTED  # or the limit fell, or memory failed
        self.memory = FakeMemory()
        self.limits = StepLimits(
            tokens=sequences + spare_tokens,
            sequences=sequences,
            block_tokens=block_tokens,
            logit_rows=2 * sequences,
            reserve=reserve,
        )
        floor_tokens = 2
        # A gate leaves the oldest one token in a step full of others' decodes.
        self.least_chunk = 1 if gated else min(spare_tokens, floor_tokens, sequences)
        self.pool = BlockPool(blocks + 1, 3, self.memory)
        pacer = StepPacer(target_s, floor_tokens)
        self.scheduler = Scheduler(self.pool, self.limits, pacer, self.gate)
        if short_answers:
            expect_short_answers(self.scheduler)
        self.kv = FakeKv(block_tokens)
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
    )
    def add(
        self,
        prompt: int,
        beginning: list[int],
        max_tokens: int,
        min_tokens: int,
        prompt_logprobs: int | None,
        salt: bytes,
    ) -> None:
        most = self.scheduler.most_tokens()
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
        )
        request.prompt = (beginning + [1] * prompt)[:prompt]
        self.arrivals += 1
        # Whoever is oldest moves in every step: at the very worst all others wait for it, and it
        # computes everything anew. So nobody waits longer than for those before it, one by one.
        before = max((p.finished_by for p in self.promises.values()), default=self.steps)
        self.promises[request.id] = Promise(request, before + self._steps_alone(request))
        self.scheduler.add(request)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.arrivals))
        assert self.scheduler.cancel(number) == (number in self.promises)
        self.promises.pop(number, None)

    @rule(full=st.booleans())
    def change_memory(self, full: bool) -> None:
        self.memory.full = full

    @rule()
    def return_memory(self) -> None:
        moves = self.pool.compact()
        self.kv.move(moves)
        self.scheduler.rename(moves)
        self.pool.return_empty_extents()

    @rule(limit=st.integers(1, 12))
    def move_limit(self, limit: int) -> None:
        self.may_preempt = True
        self.pool.set_limit(max(limit, self.scheduler.least_blocks() + 1))
        self.scheduler.shrink()
        assert self.pool.taken <= self.pool.capacity

    @rule()
    def clear_cache(self) -> None:
        self.scheduler.cache.clear()
        assert self.pool.taken == self.scheduler.cache.held

    @precondition(lambda self: self.gate is not None)
    @rule(room=st.integers(0, 40))
    def change_room(self, room: int) -> None:
        assert self.gate is not None
        self.gate.room = room

    @precondition(lambda self: self.promises)
    @rule(
        data=st.data(),
        duration_s=st.sampled_from([0.01, 0.1, 1.0]),
        most_tokens=st.none() | st.integers(1, 8),
    )
    def step(self, data: st.DataObject, duration_s: float, most_tokens: int | None) -> None:
        if self.least_chunk > 1:
            most_tokens = None  # a step made smaller need not keep the pace of a whole one
        if self.gate is not None:
            self.gate.turned_away = False
        try:
            plan = self.scheduler.plan(most_tokens)
        except MemoryError:
            assert self.memory.full
            return
        self._inspect(plan, most_tokens)
        if data.draw(st.booleans(), label="the step fails"):
            # Nothing was taken; the very same step can be planned again.
            again = self.scheduler.plan(most_tokens)
            assert [(p.sequence, p.start, p.count) for p in again.slices] == [
                (p.sequence, p.start, p.count) for p in plan.slices
            ]
            return
        tokens = st.sampled_from([1, 2, STOP_TOKEN])
        sampled = {s.sequence.id: data.draw(tokens) for s in plan.slices if s.samples}
        self._finish_step(plan, sampled, duration_s)

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
        if not hasattr(self, "pool"):
            return
        self.memory.full = False
        while self.promises:
            if self.gate is not None:
                self.gate.turned_away = False
            plan = self.scheduler.plan()
            self._inspect(plan)
            self._finish_step(plan, {s.sequence.id: 1 for s in plan.slices if s.samples}, 0.1)
            self.books_agree()
            self.nobody_starves()
        assert self.scheduler.cache.free == self.pool.capacity
        self.scheduler.cache.clear()
        assert self.pool.free == self.pool.capacity

    def _steps_alone(self, request: Submit) -> int:
        """The most steps the oldest request can take from nothing."""
        size = len(request.prompt) + request.max_tokens
        return -(-size // self.least_chunk) + request.max_tokens

    def _inspect(self, plan: Plan, most_tokens: int | None = None) -> None:
        assert plan.slices, "there is work and the step is empty"
        assert plan.tokens == sum(piece.count for piece in plan.slices) <= self.limits.tokens
        assert plan.tokens <= (most_tokens or plan.tokens)
        if self.gate is not None:
            alone = len(plan.slices) == 1 and plan.tokens <= FLOOR_TOKENS
            assert alone or self.gate.cost(plan.shape) <= self.gate.room
        assert len(plan.slices) <= self.limits.sequences
        assert sum(piece.logit_rows for piece in plan.slices) <= self.limits.logit_rows
        numbers = [piece.sequence.id for piece in plan.slices]
        assert len(numbers) == len(set(numbers)), "a sequence is in the step twice"
        for piece in plan.slices:
            sequence = piece.sequence
            assert piece.count > 0
            assert piece.start == sequence.computed
            assert piece.end <= len(sequence.tokens)
            assert piece.end <= len(sequence.blocks) * self.limits.block_tokens
        assert all(piece.sequence.decoding for piece in plan.decodes)
        # Whoever streams and still has its blocks streams on, however long others' prompts are.
        if most_tokens is None and not (self.gate and self.gate.turned_away):
            streaming = {s.id for s in self.scheduler._running if s.decoding}
            # One that gave way and found all of its KV again comes in as a chunk of one token.
            assert streaming <= {
                p.sequence.id for p in plan.slices if p in plan.decodes or p.count == 1
            }
        oldest = min(self.promises)
        assert oldest in numbers, "the oldest request was not moved"

    def _finish_step(self, plan: Plan, sampled: dict[int, int], duration_s: float) -> None:
        for piece in plan.slices:  # what the engine does with the rows of a prompt
            if piece.sequence.wants_prompt_logits:
                piece.sequence.scored = min(piece.end + 1, piece.sequence.prompt_tokens)
        self.kv.compute(plan)
        finished = self.scheduler.absorb(plan, sampled, duration_s)
        expected: dict[int, Finish] = {}
        for number, token in sampled.items():
            promise = self.promises[number]
            promise.generated += 1
            if token == STOP_TOKEN and promise.generated > promise.request.min_tokens:
                expected[number] = Finish.STOP
            elif promise.generated == promise.request.max_tokens:
                expected[number] = Finish.LENGTH
        assert finished == expected
        for number in finished:
            del self.promises[number]
        self.steps += 1


@pytest.mark.parametrize("seed", range(200))
def test_with_a_step_in_flight_every_row_sees_its_past(seed: int) -> None:
    """A step is planned before the tokens of the one before it are known, as on a GPU."""
    chance = Random(seed)
    blocks, size = chance.randint(4, 14), chance.randint(1, 4)
    pool = BlockPool(blocks + 1, 3, FakeMemory())
    scheduler = Scheduler(pool, StepLimits(9, 4, size, 8), StepPacer(None))
    expect_short_answers(scheduler)
    kv = FakeKv(size)
    truth: dict[int, list[int]] = {}
    flying: tuple[Plan, dict[int, int]] | None = None
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
            moves = pool.compact()
            kv.move(moves)
            scheduler.rename(moves)
            pool.return_empty_extents()
        plan = scheduler.plan()
        kv.compute(plan, truth)
        sampled = {
            p.sequence.id: chance.choice([1, 2, STOP_TOKEN]) for p in plan.slices if p.samples
        }
        scheduler.advance(plan)
        for number, token in sampled.items():
            truth[number].append(token)
        if flying is not None:
            scheduler.settle(*flying, 0.0)
        flying = (plan, sampled) if plan.slices else None
        scheduler.check()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


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
        assert [piece.sequence.id for piece in plan.decodes] == [0]
        assert plan.tokens <= 8
        if 1 in finished:
            break


def test_the_youngest_gives_way_and_computes_its_tokens_again() -> None:
    scheduler = make_scheduler(blocks=5, block_tokens=4, tokens=16, sequences=3)
    expect_short_answers(scheduler)
    scheduler.add(submit(0, prompt=4, max_tokens=8))
    scheduler.add(submit(1, prompt=4, max_tokens=8))
    counts: dict[int, int] = {0: 0, 1: 0}
    while scheduler.has_work():
        plan = scheduler.plan()
        assert plan.slices[0].sequence.id == min(p.sequence.id for p in plan.slices)
        sampled = {p.sequence.id: 1 for p in plan.slices if p.samples}
        for number in sampled:
            counts[number] += 1
        scheduler.absorb(plan, sampled, 0.0)
        scheduler.check()
    assert scheduler.preemptions == 1
    assert counts == {0: 8, 1: 8}, "a token was sampled twice, or never"


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    scheduler = make_scheduler(blocks=6, block_tokens=4, tokens=32)
    scheduler.add(submit(0, prompt=12, max_tokens=4))
    run_step(scheduler)
    scheduler.add(submit(1, prompt=16, max_tokens=4))  # does not fit beside the first
    scheduler.add(submit(2, prompt=1, max_tokens=1))  # would
    plan, _ = run_step(scheduler)
    assert [piece.sequence.id for piece in plan.slices] == [0]


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


def test_drop_all_names_everyone() -> None:
    scheduler = make_scheduler(blocks=3, tokens=16)
    for number in range(3):
        scheduler.add(submit(number, prompt=8, max_tokens=2))
    run_step(scheduler)
    assert sorted(scheduler.drop_all()) == [0, 1, 2]
    scheduler.check()
    assert not scheduler.has_work()


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
    assert [piece.sequence.id for piece in plan.decodes] == [0, 1]
    assert scheduler.preemptions == 0 and scheduler.running == 4
    gate.room = 1000
    plan, _ = run_step(scheduler)
    assert [piece.sequence.id for piece in plan.decodes] == [0, 1, 2, 3]


def test_decodes_leave_the_oldest_its_chunk() -> None:
    scheduler, gate = gated(room=1000)
    scheduler.add(submit(0, prompt=200, max_tokens=9))
    for number in (1, 2, 3):
        scheduler.add(submit(number, prompt=1, max_tokens=30))
    scheduler.plan(most_tokens=64)
    for _ in range(2):
        run_step(scheduler)
    gate.room = 40
    plan, _ = run_step(scheduler)
    assert 0 in [piece.sequence.id for piece in plan.chunks]


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
    pool = BlockPool(13, 2, FakeMemory())
    scheduler = Scheduler(pool, StepLimits(64, 4, 4, 8), StepPacer(None))
    for number in range(3):
        scheduler.add(submit(number, prompt=8, max_tokens=4))
    scheduler.plan()
    assert scheduler.running == 3
    pool.set_limit(scheduler.least_blocks() + 1)
    scheduler.shrink()
    assert (scheduler.running, scheduler.waiting) == (1, 2)
    scheduler.check()


def launch(scheduler: Scheduler) -> tuple[Plan, dict[int, int]]:
    """Plan a step and let it fly; what it will have sampled."""
    plan = scheduler.plan()
    sampled = {piece.sequence.id: 1 for piece in plan.slices if piece.samples}
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
        scheduler.settle(*before, 0.0)
    # Two more rows, then nothing: the last token is on its way and needs no row of its own.
    assert generated == [1, 1, 0]


def test_an_answer_that_ends_in_flight_drops_what_was_launched_for_it() -> None:
    scheduler = make_scheduler()
    scheduler.add(submit(1, 3, 9, stop_token_ids=[STOP_TOKEN]))
    first, _ = launch(scheduler)
    second, _ = launch(scheduler)
    sequence = first.slices[0].sequence
    assert scheduler.settle(first, {1: STOP_TOKEN}, 0.0) == {1: Finish.STOP}
    assert scheduler.settle(second, {1: 1}, 0.0) == {}
    assert sequence.tokens[3:] == [STOP_TOKEN]
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
        finished |= scheduler.settle(*before, 0.0)
        scheduler.check()
    assert scheduler.preemptions > 0
    assert finished == {1: Finish.LENGTH, 2: Finish.LENGTH}
