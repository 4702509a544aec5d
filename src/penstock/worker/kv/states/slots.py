"""Slots for the recurrent state of sequences, and which prefixes have a snapshot of it. No torch.

A slot is what a block is to KV: a place in an arena of its own, out of the same budget. A sequence
that runs holds one, which every step overwrites. A snapshot is a second slot, written once, when
the state is that behind the last token of a block; it is found under that block's key:

    planned ──a step writes it──▶ pending ──all its tokens are known──▶ evictable, under a key

What has blocks up to some token is of use to a sequence only with the state behind that token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.worker.kv.hashes import BlockHashes
    from penstock.worker.kv.pools import GroupedPools, GroupMemory

    Place = NDArray[np.int32]  # of one slot: its number, which follows it when it is moved


class Snapshot(NamedTuple):
    """The state behind so many tokens, on its way into a slot."""

    tokens: int
    place: Place
    passing: bool  # only until there is a later one of the same sequence


@dataclass(slots=True)
class SequenceState:
    """The slots of one sequence."""

    place: Place = field(default_factory=lambda: np.zeros(1, np.int32))  # 0: it has none
    pending: list[Snapshot] = field(default_factory=list)
    passing: bytes | None = None  # the key of its latest snapshot that is only for now
    used: dict[bytes, None] = field(default_factory=dict)  # keys of its snapshots, by their use

    @property
    def places(self) -> Iterator[Place]:
        """All it holds."""
        if self.place[0]:
            yield self.place
        for snapshot in self.pending:
            yield snapshot.place


class States:
    """What recurrent state is to the cache; here, of a model that has none."""

    slot_bytes = 0
    # A prompt's state is another than that of the same tokens generated: these have no snapshots.
    prompts_differ = False

    def find(self, key: bytes) -> bool:
        """Whether a sequence can go on behind a block."""
        return True

    def begin(self, state: SequenceState, key: bytes | None, spare_bytes: int) -> None:
        """Have a slot, with the snapshot behind a block in it; None: at the first token."""

    def go_on(self, state: SequenceState, key: bytes) -> None:
        """Have the snapshot behind a block in the slot that there is."""

    def room(self, free_bytes: int) -> bool:
        """Whether there is a slot for one more snapshot, where so much can still be taken."""
        return False

    def snapshot(self, state: SequenceState, tokens: int, *, passing: bool) -> None:
        """Have a slot for the state behind so many tokens; the caller has checked the room."""

    def retract(self, state: SequenceState, tokens: int) -> None:
        """What was planned behind more than so many tokens was not computed."""

    def commit(self, state: SequenceState, hashes: BlockHashes, tokens: int) -> None:
        """The first tokens are known, and what was planned behind them is written."""

    def release(self, state: SequenceState) -> None:
        """Give all slots back; snapshots can be found until they are evicted."""

    def back(self) -> bool:
        """Whether `begin` would commit nothing that steps wait for."""
        return True

    def moved(self, states: Iterator[SequenceState], moves: dict[int, int]) -> None:
        """Slots have been copied elsewhere: old number to new."""


class StateSlots(States):
    """Slots out of one of the pools."""

    def __init__(self, pools: GroupedPools, number: int, memory: GroupMemory) -> None:
        self._pools = pools
        self._number = number
        self._memory = memory
        self._cache = pools.caches[number]
        self.slot_bytes = memory.block_bytes

    def find(self, key: bytes) -> bool:
        return self._cache.find(key) is not None

    def begin(self, state: SequenceState, key: bytes | None, spare_bytes: int) -> None:
        if key is None:
            state.place[0] = self._take()
            return
        source = self._cache.find(key)
        assert source is not None, "the snapshot was evicted between match and admit"
        # It may be the oldest that there is, and would be evicted to make room.
        self._cache.share(source)
        if spare_bytes < self.slot_bytes:  # there is no room for both
            self._cache.withdraw(source)
            state.place[0] = source
            return
        held = np.array([source], np.int32)
        state.pending.append(Snapshot(0, held, passing=False))  # so that it follows a move
        state.place[0] = self._take()
        state.pending.pop()
        self._memory.copy({int(held[0]): int(state.place[0])})
        self._cache.give([int(held[0])])
        state.used[key] = None

    def go_on(self, state: SequenceState, key: bytes) -> None:
        source = self._cache.find(key)
        assert source is not None, "there is no such snapshot"
        self._memory.copy({source: int(state.place[0])})
        self._cache.touch([source])
        state.used[key] = None

    def room(self, free_bytes: int) -> bool:
        return self.slot_bytes <= free_bytes and self._pools.unheld(self._number) > 0

    def snapshot(self, state: SequenceState, tokens: int, *, passing: bool) -> None:
        place = np.array([self._take()], np.int32)
        state.pending.append(Snapshot(tokens, place, passing))

    def retract(self, state: SequenceState, tokens: int) -> None:
        while state.pending and state.pending[-1].tokens > tokens:
            self._cache.give([int(state.pending.pop().place[0])])

    def commit(self, state: SequenceState, hashes: BlockHashes, tokens: int) -> None:
        while state.pending and state.pending[0].tokens <= tokens:
            snapshot = state.pending.pop(0)
            slot, key = (
                int(snapshot.place[0]),
                hashes.key(snapshot.tokens // hashes.block_tokens - 1),
            )
            self._cache.insert(slot, key)
            self._cache.give([slot])
            if state.passing is not None and (old := self._cache.find(state.passing)) is not None:
                state.used.pop(state.passing, None)
                self._cache.evict([old])
            state.passing = key if snapshot.passing else None
            state.used[key] = None

    def release(self, state: SequenceState) -> None:
        self._cache.give([int(place[0]) for place in state.places])
        known = (self._cache.find(key) for key in state.used)
        self._cache.touch([slot for slot in known if slot is not None])
        state.place[0] = 0
        state.pending.clear()
        state.used.clear()
        state.passing = None

    def back(self) -> bool:
        return self._pools.back(self._number, 1)

    def moved(self, states: Iterator[SequenceState], moves: dict[int, int]) -> None:
        for state in states:
            for place in state.places:
                place[0] = moves.get(int(place[0]), int(place[0]))

    def _take(self) -> int:
        return self._pools.take(self._number, 1)[0]
