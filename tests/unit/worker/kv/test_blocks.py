"""The pool of KV blocks: examples, and a state machine over memory that fails at times."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.worker.kv.blocks import BlockPool


class FakeMemory:
    """Extents that are backed or not; commits fail while `left` is 0."""

    def __init__(self) -> None:
        self.backed: set[int] = set()
        self.left: int | None = None  # commits until the memory is full; None: never

    def commit(self, extent: int) -> None:
        assert extent not in self.backed, "committed twice"
        if self.left is not None:
            if self.left == 0:
                raise MemoryError
            self.left -= 1
        self.backed.add(extent)

    def decommit(self, extent: int) -> None:
        self.backed.remove(extent)
        if self.left is not None:
            self.left += 1


class PoolMachine(RuleBasedStateMachine):
    @initialize(limit=st.integers(2, 40), extent_blocks=st.integers(1, 9))
    def open(self, limit: int, extent_blocks: int) -> None:
        self.memory = FakeMemory()
        self.extent_blocks = extent_blocks
        self.total = limit
        self.pool = BlockPool(limit, extent_blocks, self.memory)
        self.held: list[int] = []

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.free))
        self.committed_before = self.pool.committed
        try:
            taken = self.pool.take(count)
        except MemoryError:
            assert self.memory.left == 0
            return
        assert len(taken) == count
        assert not set(taken).intersection(self.held), "a block has two owners"
        self.held += taken
        # However the limit has moved: nothing beyond it is committed for this.
        if taken and self.total % self.extent_blocks == 0:
            allowed = -(-(self.pool.capacity + 1) // self.extent_blocks)
            assert self.pool.committed <= max(allowed, self.committed_before)

    @rule(excess=st.integers(1, 5))
    def take_too_many(self, excess: int) -> None:
        with pytest.raises(ValueError, match="blocks asked"):
            self.pool.take(self.pool.free + excess)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.held), unique=True))
        self.pool.give(blocks)
        self.held = [block for block in self.held if block not in blocks]
        if blocks:
            with pytest.raises(ValueError, match="was not taken"):
                self.pool.give(blocks[:1])

    @rule()
    def return_memory(self) -> None:
        before = len(self.memory.backed)
        returned = self.pool.return_empty_extents()
        assert len(self.memory.backed) == before - returned
        needed = {block // self.extent_blocks for block in self.held} | {0}
        assert self.memory.backed == needed, "an extent nobody uses is still backed"

    @rule(limit=st.integers(0, 50))
    def move_limit(self, limit: int) -> None:
        self.pool.set_limit(limit)
        assert self.pool.capacity == max(2, min(limit, self.total)) - 1

    @rule()
    def compact(self) -> None:
        owners = {block: owner for owner, block in enumerate(self.held)}
        moves = self.pool.compact()
        assert not set(moves).intersection(moves.values()), "a copy would read what it has written"
        assert set(moves) <= set(self.held) and not set(moves.values()) & set(self.held)
        self.held = [moves.get(block, block) for block in owners]
        assert len(set(self.held)) == len(self.held)
        if self.total % self.extent_blocks == 0:
            used = {block // self.extent_blocks for block in self.held} | {0}
            assert len(used) <= -(-(len(self.held) + 1) // self.extent_blocks)

    @rule(left=st.none() | st.integers(0, 2))
    def change_memory(self, left: int | None) -> None:
        self.memory.left = left

    @invariant()
    def books_agree(self) -> None:
        self.pool.check()
        assert self.pool.free == max(0, self.pool.capacity - len(self.held))
        assert self.pool.taken == len(self.held)
        assert self.pool.committed == len(self.memory.backed)
        assert {block // self.extent_blocks for block in self.held} <= self.memory.backed
        assert 0 in self.memory.backed

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.give(self.held)
            self.memory.left = None
            self.pool.set_limit(self.total)
            assert sorted(self.pool.take(self.pool.free)) == list(range(1, self.pool.capacity + 1))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(stateful_step_count=30)


def test_the_fullest_extent_is_filled_first_so_that_the_others_drain() -> None:
    memory = FakeMemory()
    pool = BlockPool(total=12, extent_blocks=4, backing=memory)
    everything = pool.take(11)
    pool.give([block for block in everything if block in (5, 6, 7, 10)])
    assert pool.take(1) == [10]  # extent 2 has one block free, extent 1 has three
    pool.give([4])
    assert pool.return_empty_extents() == 1
    assert memory.backed == {0, 2}


def test_committed_blocks_are_used_before_new_memory_is() -> None:
    memory = FakeMemory()
    pool = BlockPool(total=100, extent_blocks=10, backing=memory)
    pool.take(9)
    assert memory.backed == {0}
    pool.take(1)
    assert memory.backed == {0, 1}


def test_a_failed_commit_hands_out_nothing() -> None:
    memory = FakeMemory()
    pool = BlockPool(total=12, extent_blocks=4, backing=memory)
    memory.left = 1
    with pytest.raises(MemoryError):
        pool.take(11)
    pool.check()
    assert pool.free == 11


@pytest.mark.parametrize(("limit", "extent_blocks"), [(1, 4), (0, 4), (8, 0)])
def test_a_pool_without_room_is_refused(limit: int, extent_blocks: int) -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(limit, extent_blocks, FakeMemory())


def test_a_lower_limit_takes_nothing_away_and_hands_nothing_out() -> None:
    memory = FakeMemory()
    pool = BlockPool(total=12, extent_blocks=4, backing=memory)
    held = pool.take(7)
    pool.set_limit(5)
    assert (pool.capacity, pool.free, pool.taken) == (4, 0, 7)
    pool.give(held[:4])
    assert pool.free == 1
    pool.set_limit(100)
    assert pool.capacity == 11


def test_compacting_empties_whole_extents() -> None:
    memory = FakeMemory()
    pool = BlockPool(total=16, extent_blocks=4, backing=memory)
    everything = pool.take(15)
    pool.give([block for block in everything if block not in (2, 6, 10)])
    moves = pool.compact()
    assert set(moves) == {6, 10} and set(moves.values()) <= {1, 3}
    assert pool.return_empty_extents() == 3
    assert memory.backed == {0}
