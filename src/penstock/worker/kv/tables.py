"""One sequence's KV: a table of blocks for each layer group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.worker.kv.states.slots import SequenceState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.worker.kv.hashes import BlockHashes
    from penstock.worker.kv.tier import Fetch


class BlockTable:
    """Block numbers by block index, in an array that grows in place.

    Indexes below `freed` have no block any more, all others up to `count` have one.
    """

    __slots__ = ("_numbers", "count", "freed")

    def __init__(self) -> None:
        self._numbers = np.zeros(16, np.int32)
        self.count = 0
        self.freed = 0

    @property
    def numbers(self) -> NDArray[np.int32]:
        """One for each index; 0 where there is no block."""
        return self._numbers[: self.count]

    @property
    def blocks(self) -> list[int]:
        """Those that there are."""
        held: list[int] = self.numbers[self.freed :].tolist()
        return held

    def append(self, blocks: Sequence[int]) -> None:
        """Blocks for the next indexes, behind those that were freed."""
        start = max(self.count, self.freed)
        end = start + len(blocks)
        if end > len(self._numbers):
            grown = np.zeros(max(end, 2 * len(self._numbers)), np.int32)
            grown[: self.count] = self.numbers
            self._numbers = grown
        self._numbers[start:end] = blocks
        self.count = end

    def free(self, end: int) -> list[int]:
        """Have no blocks below an index any more; those that there were."""
        numbers = self.numbers[self.freed : end]
        held: list[int] = numbers.tolist()
        numbers[:] = 0
        self.freed = max(self.freed, end)
        return held

    def cut(self, count: int) -> list[int]:
        """Have no blocks from an index on; those that there were."""
        held = self.blocks[max(0, count - self.freed) :]
        self._numbers[count : self.count] = 0
        self.count = min(self.count, count)
        return held


@dataclass(slots=True, eq=False)
class KvHandle:
    """One sequence's KV. To be read by its owner: `computed` and `fetching`."""

    hashes: BlockHashes
    tables: list[BlockTable]
    known: int = 0  # blocks, from the first on, that others can find, or could while in a window
    computed: int = 0  # tokens found computed at `admit`, by `catch_up`, or brought by a fetch
    fetches: dict[int, GroupFetch] = field(default_factory=dict)  # by group
    fetch_end: int = 0  # blocks that it will have when all have come
    state: SequenceState = field(default_factory=SequenceState)  # of recurrent layers

    @property
    def fetching(self) -> bool:
        """Blocks are being brought: nothing of it may be computed meanwhile."""
        return bool(self.fetches)

    @property
    def arrays(self) -> tuple[NDArray[np.int32], ...]:
        """Its tables, for a plan."""
        return tuple(table.numbers for table in self.tables)


@dataclass(slots=True)
class GroupFetch:
    """What is brought of one group."""

    fetch: Fetch
    first: int  # index of the first block
    before: BlockTable | None  # to go back to if it fails, where the fetch is for a later window
    inserted: int = 0  # blocks that landed and can be found


@dataclass(frozen=True, slots=True)
class Match:
    """Known blocks of a sequence's first tokens."""

    blocks: tuple[list[int], ...]  # per group: those that what follows needs
    count: int  # blocks from the first on that need not be computed
    held_bytes: int  # of those that others hold, so that sharing them costs nothing
    known: int = 0  # blocks that are here, but behind `count` not the state to go on from
