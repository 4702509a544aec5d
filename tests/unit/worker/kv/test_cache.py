"""KvCache with layer groups: a state machine over fake memory, and examples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.catalog.kv_formats import kv_format
from penstock.testing.fake_kv import FakeKv
from penstock.worker.core.plan import Plan, Slice
from penstock.worker.kv.groups import split_layers
from penstock.worker.kv.held import HeldBlocks
from penstock.worker.kv.tier import Tier

if TYPE_CHECKING:
    import pytest

    from penstock.worker.kv.tables import KvHandle
    from penstock.worker.kv.tier import Find

WINDOWS = [(None,), (None, 3), (None, 9), (7,), (None, 12, 5), (None, 1)]


@dataclass(eq=False)
class FakeFetch:
    group: int
    keys: list[bytes]
    blocks: list[int]
    landed: int = 0
    done: bool = False


class FakeTier(Tier):
    """Keeps what stood in blocks; brings it back in pieces, and now and then not at all."""

    def __init__(self, kv: FakeKv) -> None:
        self.kv = kv
        self.waiting: list[tuple[int, bytes]] = []
        self.kept: dict[tuple[int, bytes], dict[int, int]] = {}
        self.fetches: list[FakeFetch] = []
        self.fails = False

    def keep(self, group: int, key: bytes) -> None:
        self.waiting.append((group, key))

    def offer(self, find: Find) -> bool:
        for group, key in self.waiting:
            block = find(group, key)
            if block is not None:
                content = self.kv.memories[group].content
                self.kept[group, key] = {
                    slot: content[block, slot]
                    for slot in range(self.kv.block_tokens)
                    if (block, slot) in content
                }
        self.waiting.clear()
        return False

    def covers(self, group: int, keys: list[bytes]) -> list[bool]:
        return [(group, key) in self.kept for key in keys]

    def fetch(self, group: int, keys: list[bytes], blocks: list[int]) -> FakeFetch:
        self.fetches.append(FakeFetch(group, keys, blocks))
        return self.fetches[-1]

    def drop(self, group: int, fetch: object) -> None:
        assert isinstance(fetch, FakeFetch)
        fetch.done = True
        self.fetches.remove(fetch)

    def deliver(self) -> None:
        for fetch in list(self.fetches):
            if fetch.landed < len(fetch.keys) and not self.fails:
                index = fetch.landed
                content = self.kv.memories[fetch.group].content
                for slot, state in self.kept[fetch.group, fetch.keys[index]].items():
                    content[fetch.blocks[index], slot] = state
                fetch.landed += 1
            if self.fails or fetch.landed == len(fetch.keys):
                fetch.done = True
                self.fetches.remove(fetch)

    def moved(self, group: int, moves: dict[int, int]) -> None:
        for fetch in self.fetches:
            if fetch.group == group:
                fetch.blocks = [moves.get(block, block) for block in fetch.blocks]


@dataclass(eq=False)
class Sequence:
    handle: KvHandle
    tokens: list[int]
    computed: int = 0


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(2, 9),
        block_tokens=st.integers(1, 4),
        windows=st.sampled_from(WINDOWS),
        extent_blocks=st.integers(1, 3),
        state_bytes=st.sampled_from([0, 0, 8, 40, 300]),
    )
    def open(
        self,
        blocks: int,
        block_tokens: int,
        windows: tuple[int | None, ...],
        extent_blocks: int,
        state_bytes: int,
    ) -> None:
        self.kv = FakeKv(
            blocks,
            block_tokens,
            windows=windows,
            extent_blocks=extent_blocks,
            step_tokens=8,
            state_bytes=state_bytes,
        )
        self.cache = self.kv.cache
        self.tier = FakeTier(self.kv)
        self.cache._held.tier = self.tier
        self.limit = self.cache.limit_bytes
        self.running: list[Sequence] = []

    @rule(beginning=st.integers(0, 3), length=st.integers(1, 24))
    def admit(self, beginning: int, length: int) -> None:
        tokens = ([1] * 4 * beginning + [2 + beginning] * 24)[:length]
        handle = self.cache.open(tokens)
        match = self.cache.match(handle, length - 1)
        needed = self.cache.need_bytes(length) - match.held_bytes
        if needed > self.cache.capacity_bytes - self.cache.held_bytes:
            return
        try:
            self.cache.admit(handle, match, length)
        except MemoryError:
            assert not handle.fetching and handle.computed == 0
            return
        self.running.append(Sequence(handle, tokens, handle.computed))

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        count=st.integers(1, 8),
        more=st.booleans(),
        kept=st.sets(st.integers(1, 40)),
        passing=st.booleans(),
    )
    def compute(
        self, data: st.DataObject, count: int, more: bool, kept: set[int], passing: bool
    ) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        if sequence.handle.fetching:
            return
        sequence.computed = max(sequence.computed, sequence.handle.computed)
        if sequence.computed == len(sequence.tokens):
            if not more:
                return
            sequence.tokens.append(3)
        count = min(count, len(sequence.tokens) - sequence.computed)
        end = sequence.computed + count
        if not self.cache.extendable(sequence.handle, end):
            return
        try:
            self.cache.extend(sequence.handle, end)
        except MemoryError:
            return
        start, state = sequence.computed, sequence.handle.state
        try:
            self._keep(sequence.handle, [n for n in sorted(kept) if start < n <= end], passing)
        except MemoryError:
            self.cache.states.retract(state, start)
            return
        piece = Slice(0, start, sequence.tokens[start:end], sequence.handle.arrays, 1, samples=True)
        piece = replace(piece, state=state.place, snapshots=tuple(state.pending))
        self.kv.compute(Plan(chunks=[piece]), {0: sequence.tokens}, {})
        sequence.computed = end
        self.cache.commit(sequence.handle, end, end)

    def _keep(self, handle: KvHandle, places: list[int], passing: bool) -> None:
        """Snapshots of the state at ends of blocks, while there is room."""
        for tokens in places:
            if tokens % self.kv.block_tokens == 0 and self.cache.states.room(self.cache.free_bytes):
                self.cache.states.snapshot(handle.state, tokens, passing=passing)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def catch_up(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        if not sequence.handle.fetching:
            computed = max(sequence.computed, sequence.handle.computed)
            tokens = len(sequence.tokens) - 1
            sequence.computed = self.cache.catch_up(sequence.handle, computed, tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.cache.release(sequence.handle)

    @rule(fails=st.booleans())
    def poll(self, fails: bool) -> None:
        self.tier.fails = fails
        self.cache.poll()

    @rule(full=st.booleans())
    def change_memory(self, full: bool) -> None:
        for memory in self.kv.all_memories:
            memory.full = full

    @rule(share=st.floats(0, 1))
    def resize(self, share: float) -> None:
        least = self.cache.limit_for(self.cache.held_bytes)
        self.cache.set_limit(max(least, int(self.limit * share)))
        self.cache.trim()
        assert self.cache.committed_bytes <= self.cache.limit_bytes

    @rule()
    def compact(self) -> None:
        self.cache.compact()

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        for sequence in self.running:
            if not sequence.handle.fetching:
                computed = max(sequence.computed, sequence.handle.computed)
                self.cache.check_writable(sequence.handle, computed)
                self._holds_what_it_needs(sequence.handle, computed)

    def _holds_what_it_needs(self, handle: KvHandle, computed: int) -> None:
        """All that a next row sees, and between two chunks no more than it is said to cost."""
        size = self.kv.block_tokens
        for group, table in zip(self.kv.groups, handle.tables, strict=True):
            first = group.first_needed_block(computed)
            assert table.numbers[first : -(-computed // size)].all()
            if group.window is not None:
                held = max(0, -(-computed // size) - table.freed)
                assert held <= (group.window - 2) // size + 2

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for sequence in self.running:
                self.cache.release(sequence.handle)
            self.cache.check()
            assert self.cache.held_bytes == 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(stateful_step_count=50)


def run(kv: FakeKv, tokens: list[int], chunk: int = 8) -> KvHandle:
    """Compute a sequence in chunks; it holds its blocks."""
    cache = kv.cache
    handle = cache.open(tokens)
    cache.admit(handle, cache.match(handle, len(tokens) - 1), len(tokens))
    start = handle.computed
    while start < len(tokens):
        end = min(start + chunk, len(tokens))
        cache.extend(handle, end)
        piece = Slice(0, start, tokens[start:end], handle.arrays, 1, samples=True)
        kv.compute(Plan(chunks=[piece]), {0: tokens}, {})
        cache.commit(handle, end, end)
        cache.check()
        start = end
    return handle


def contexts_that_fit(kv: FakeKv, length: int) -> int:
    """How many different sequences of a length can hold their KV at once."""
    count = 0
    while kv.cache.need_bytes(length) <= kv.cache.capacity_bytes - kv.cache.held_bytes:
        run(kv, [count] * length)
        count += 1
    return count


def test_blocks_that_left_the_window_are_free_at_once() -> None:
    kv = FakeKv(100, 4, windows=(None, 16), step_tokens=8)
    handle = run(kv, list(range(200)))
    full, window = handle.tables
    assert len(full.blocks) == 50
    assert len(window.blocks) <= 16 // 4 + 1
    assert not window.numbers[: window.freed].any()
    # They stay in the prefix cache until somebody needs the room.
    assert kv.cache.evictable_bytes == (50 - len(window.blocks)) * kv.groups[1].block_bytes


def test_without_the_early_freeing_fewer_contexts_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = contexts_that_fit(FakeKv(200, 4, windows=(None, 16), step_tokens=8), 200)
    monkeypatch.setattr(HeldBlocks, "free_passed", lambda *_: None)
    without = contexts_that_fit(FakeKv(200, 4, windows=(None, 16), step_tokens=8), 200)
    assert without * 2 < with_it


def test_a_prefix_is_found_with_the_windows_last_blocks_only() -> None:
    kv = FakeKv(100, 4, windows=(None, 8), step_tokens=8)
    tokens = list(range(60))
    kv.cache.release(run(kv, tokens))
    handle = kv.cache.open([*tokens, 90, 91])
    match = kv.cache.match(handle, 61)
    assert match.count == 15
    assert [len(blocks) for blocks in match.blocks] == [15, 2]


def test_a_prefix_without_its_window_is_not_used() -> None:
    kv = FakeKv(100, 4, windows=(None, 8), step_tokens=8)
    tokens = list(range(60))
    kv.cache.release(run(kv, tokens))
    window = kv.cache.pools.caches[1]
    window.evict([window.find(key) or 0 for key in [kv.cache.open(tokens).hashes.key(14)]])
    match = kv.cache.match(kv.cache.open([*tokens, 90, 91]), 61)
    assert match.count == 14, "the block before it still has its window"


def test_layers_of_one_window_are_a_group_and_a_window_of_the_context_is_none() -> None:
    windows = {0: 128, 1: None, 2: 4096, 3: 128}
    groups = split_layers(
        dict.fromkeys(range(4), 10), windows, 16, 4096, kv_format("auto", "float32")
    )
    assert [(group.layers, group.window) for group in groups] == [((1, 2), None), ((0, 3), 128)]
