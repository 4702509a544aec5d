"""Where states are kept: at ends of prompts, at junctions, every so often, and for now."""

from __future__ import annotations

from penstock.testing.fake_kv import FakeKv, absorb
from penstock.wire import Sampling, Submit
from penstock.worker.core.borders import OPENING_TOKENS, Borders
from penstock.worker.core.pacer import StepPacer
from penstock.worker.core.plan import Plan, StepLimits
from penstock.worker.core.scheduler import Scheduler

BLOCK = 4
BLOCK_BYTES = 8 * BLOCK


class World:
    """A scheduler over fake memory that checks every state."""

    def __init__(self, state_blocks: int = 100, blocks: int = 2000, tokens: int = 16) -> None:
        self.kv = FakeKv(blocks, BLOCK, step_tokens=tokens, state_bytes=state_blocks * BLOCK_BYTES)
        limits = StepLimits(tokens, 4, BLOCK, 8)
        self.scheduler = Scheduler(self.kv.cache, limits, StepPacer(None))
        self.kept: list[tuple[int, int, bool]] = []  # request, tokens, only for now
        self.computed: dict[int, int] = {}

    def add(self, number: int, prompt: list[int], max_tokens: int = 1) -> None:
        self.scheduler.add(Submit(number, prompt, max_tokens, Sampling(temperature=0)))

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        truth = {}
        for piece in plan.slices:
            sequence = self.scheduler.find(piece.request_id)
            assert sequence is not None
            truth[piece.request_id] = list(sequence.tokens)
            number = piece.request_id
            self.computed[number] = self.computed.get(number, 0) + piece.count
            self.kept += [(number, s.tokens, s.passing) for s in piece.snapshots]
        self.kv.compute(plan, truth, {})
        absorb(self.scheduler, plan, {p.request_id: 9 for p in plan.slices if p.samples})
        self.scheduler.check()
        return plan

    def run(self) -> None:
        while self.scheduler.has_work():
            self.step()


def test_a_prompts_state_is_kept_a_little_before_its_end() -> None:
    world = World()
    world.add(0, list(range(50)))
    world.run()
    end = (50 - OPENING_TOKENS) // BLOCK * BLOCK
    assert world.kept == [(0, end, False)]
    # The next turn differs in the last tokens, as an opening of an answer that is not kept.
    world.add(1, [*range(50 - OPENING_TOKENS), 70, 71, 72, 73])
    world.run()
    assert world.computed[1] == 50 - OPENING_TOKENS + 4 - end


def test_an_answer_leaves_its_latest_block_only() -> None:
    world = World()
    world.add(0, list(range(20)), max_tokens=14)
    world.run()
    passing = [tokens for _, tokens, passing in world.kept if passing]
    assert passing == [24, 28, 32]
    handle = world.kv.cache.open([*range(20), *[9] * 14])
    found = [
        index + 1 for index in range(8) if world.kv.cache.states.find(handle.hashes.key(index))
    ]
    assert found == [3, 8], "12 tokens of the prompt, and 32"
    world.add(1, [*range(20), *[9] * 14, 50])
    world.run()
    assert world.computed[1] == 35 - 32


def test_states_are_kept_so_often_that_they_take_no_more_than_the_kv_between() -> None:
    world = World(state_blocks=8)
    world.add(0, list(range(200)))
    world.run()
    assert [tokens for _, tokens, _ in world.kept] == [32, 64, 96, 128, 160, 192]
    assert Borders(world.kv.cache)._apart == 32


def test_a_follower_waits_for_the_state_where_its_prompt_branches_off() -> None:
    world = World()
    world.add(0, [*range(30), 100, *range(200, 230)])
    world.add(1, [*range(30), 101, *range(300, 330)])
    plan = world.step()
    assert [piece.request_id for piece in plan.slices] == [0], "the other waits"
    world.run()
    assert (0, 28, False) in world.kept
    assert world.computed == {0: 61, 1: 61 - 28}


def test_kv_that_is_known_further_than_a_state_gets_one() -> None:
    world = World()
    first = [*range(60), *range(100, 160)]
    world.add(0, first)
    world.run()
    for number, begin in ((1, 200), (2, 300)):
        world.add(number, [*range(60), *range(begin, begin + 20)])
        world.run()
    assert (1, 60, False) in world.kept
    assert world.computed[1] == 80 and world.computed[2] == 20


def test_where_prompts_differ_nothing_is_kept_of_answers() -> None:
    world = World(state_blocks=8)
    world.kv.cache.states.prompts_differ = True
    world.add(0, list(range(20)), max_tokens=60)
    world.run()
    assert world.kept == [(0, 12, False)]


def test_snapshots_take_only_what_is_left() -> None:
    world = World(blocks=8, state_blocks=2)
    world.add(0, list(range(24)), max_tokens=8)
    world.run()
    assert world.kv.cache.held_bytes == 0
    assert world.scheduler.preemptions == 0


def test_a_step_that_is_planned_anew_keeps_nothing_twice() -> None:
    world = World(state_blocks=8)
    world.add(0, list(range(40)))
    for _ in range(5):
        world.scheduler.plan()
    held = world.kv.cache.held_bytes
    world.scheduler.plan()
    assert world.kv.cache.held_bytes == held
    world.run()
