"""A KvCache without memory behind it, and what would stand in its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.worker.kv.cache import KvCache
from penstock.worker.kv.groups import LayerGroup, cost_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.worker.core.plan import Plan, Slice
    from penstock.worker.core.scheduler import Scheduler
    from penstock.worker.core.sequence import Ended

TOKEN_BYTES = 8


class FakeMemory:
    """The memory of one group: fails every commit while `full`."""

    full = False

    def __init__(
        self, block_bytes: int, blocks: int, extent_blocks: int, *, commits_slowly: bool = False
    ) -> None:
        self.blocks = blocks
        self.step_extents = 1 if commits_slowly else None
        self.commits = 0
        self.extent_blocks = extent_blocks
        self.block_bytes = block_bytes
        self.moves: list[dict[int, int]] = []
        self.content: dict[tuple[int, int], int] = {}  # by block and slot

    @property
    def unit_bytes(self) -> int:
        return self.extent_blocks * self.block_bytes

    def commit(self, extent: int) -> None:
        if self.full:
            raise MemoryError
        self.commits += 1

    def decommit(self, extent: int) -> None:
        """Its content is gone."""
        first = extent * self.extent_blocks
        gone = range(first, first + self.extent_blocks)
        for place in [place for place in self.content if place[0] in gone]:
            del self.content[place]

    def copy(self, moves: dict[int, int]) -> None:
        for (block, slot), state in list(self.content.items()):
            if block in moves:
                self.content[moves[block], slot] = state


class FakeKv:
    """A cache over fake memories; what a step computes is a hash of everything up to that token."""

    def __init__(  # noqa: PLR0913 - what a cache may have
        self,
        blocks: int,
        block_tokens: int,
        *,
        windows: Sequence[int | None] = (None,),
        extent_blocks: int = 2,
        step_tokens: int = 16,
        commits_slowly: bool = False,
        state_bytes: int = 0,
    ) -> None:
        """`blocks` of all groups together can be held, beside what a chunk needs; and a state of
        that size, where layers have one."""
        self.block_tokens = block_tokens
        self.groups = [
            LayerGroup((number,), window, TOKEN_BYTES * (1 + number), block_tokens)
            for number, window in enumerate(windows)
        ]
        alone = tuple(windows) == (None,) and not state_bytes
        total = blocks + 1 if alone else 4 * blocks + 256
        self.memories = [
            FakeMemory(group.block_bytes, total, extent_blocks, commits_slowly=commits_slowly)
            for group in self.groups
        ]
        self.states = None
        if state_bytes:
            self.states = FakeMemory(state_bytes, total, 1, commits_slowly=commits_slowly)
        cost = cost_of(self.groups, step_tokens, state_bytes)
        self.cache = KvCache(self.groups, self.memories, cost, 0, states=self.states)
        size = blocks * sum(group.block_bytes for group in self.groups)
        self.cache.set_limit(self.cache.limit_for(size + state_bytes))

    @property
    def all_memories(self) -> list[FakeMemory]:
        """Of blocks and of states."""
        return self.memories + ([] if self.states is None else [self.states])

    def compute(
        self, plan: Plan, truth: Mapping[int, list[int]], salts: Mapping[int, bytes]
    ) -> None:
        """Every token sees the right past, whoever computed it, and adds its own; `truth` has all
        tokens of every request."""
        for piece in plan.slices:
            tokens = truth[piece.request_id]
            if self.states is not None:
                self._move_state(piece, tokens, self.states, salts.get(piece.request_id, b""))
            for number, (group, memory) in enumerate(zip(self.groups, self.memories, strict=True)):
                state = hash(salts.get(piece.request_id, b""))
                first = group.first_needed_block(piece.start) * self.block_tokens
                if group.window is not None:
                    first = max(0, piece.start - group.window + 1)
                for position, token in enumerate([*tokens[: piece.end], *piece.drafts]):
                    state = hash((state, token))
                    index, slot = divmod(position, self.block_tokens)
                    place = int(piece.tables[number][index]), slot
                    if position >= piece.start:  # nobody reads what another writes in this step
                        assert place[0], "a row is written to no block"
                        memory.content[place] = state
                    elif position >= first:
                        assert memory.content.get(place) == state, "another's past, or none"

    def _move_state(
        self, piece: Slice, tokens: Sequence[int], memory: FakeMemory, salt: bytes
    ) -> None:
        """The state in the sequence's slot moves on over the slice, past places to be kept."""
        slot, state = int(piece.state[0]), hash(salt)
        kept = {snapshot.tokens: int(snapshot.place[0]) for snapshot in piece.snapshots}
        assert slot, "a sequence has no slot"
        assert all(piece.start < place <= piece.end for place in kept), "it is not in these rows"
        for position, token in enumerate(tokens[: piece.end]):
            if position and position == piece.start:
                assert memory.content.get((slot, 0)) == state, "another's state, or none"
            state = hash((state, token))
            if position >= piece.start and position + 1 in kept:
                assert kept[position + 1] != slot, "a snapshot is the state itself"
                memory.content[kept[position + 1], 0] = state
        memory.content[slot, 0] = state

    def spoil_states(self, plan: Plan) -> None:
        """A step failed behind some of its layers."""
        if self.states is not None:
            for piece in plan.slices:
                for place in (piece.state, *(snapshot.place for snapshot in piece.snapshots)):
                    self.states.content[int(place[0]), 0] = 0


def absorb(
    scheduler: Scheduler,
    plan: Plan,
    sampled: Mapping[int, int | list[int]],
    duration_s: float = 0.0,
) -> dict[int, Ended]:
    """A step that has ended when it is launched: a token, or several, for who samples."""
    scheduler.advance(plan)
    lists = {n: list(t) if isinstance(t, list) else [t] for n, t in sampled.items()}
    return scheduler.absorb(plan, lists, duration_s)
