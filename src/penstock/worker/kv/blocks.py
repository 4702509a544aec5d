"""Which KV blocks are free, and which extents of the arena must be backed by memory.

Counts and numbers only: it holds no tensor and knows nothing of requests. A block is a fixed
number of tokens; an extent is a run of blocks whose memory is committed and returned as one.

    extent 0              extent 1              extent 2
    [0][1][2] ... [k-1]   [k] ...               [2k] ...           block numbers
     ^ may be reserved: padded rows point at it. Extent 0 is always committed

Blocks are taken from the fullest committed extent first, so that the others drain and can be
returned. The limit says how many blocks may be taken at once, wherever they lie: it moves with
the memory this model is granted, while the numbers of blocks and their addresses stay.
"""

from __future__ import annotations

from heapq import heapify, heappop
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq


class Backing(Protocol):
    """The memory behind the extents."""

    def commit(self, extent: int) -> None: ...

    def decommit(self, extent: int) -> None: ...


class BlockPool:
    """Hands out block numbers below `total`, committing extents as they are needed."""

    def __init__(
        self, total: int, extent_blocks: int, backing: Backing, *, reserved: bool = True
    ) -> None:
        if total < 2 or extent_blocks < 1:
            raise ValueError(f"a pool needs at least 2 blocks (got {total}), 1 to an extent")
        self._total = total
        self._limit = total
        self._reserved = int(reserved)
        self._extent_blocks = extent_blocks
        self._backing = backing
        # Free block numbers of each committed extent, lowest on top.
        self._free: dict[int, list[int]] = {}
        self._uncommitted = list(range(self.extents - 1, -1, -1))  # lowest on top
        self._taken: set[int] = set()
        self._commit_next()
        if reserved:
            self._free[0].remove(0)

    @property
    def extents(self) -> int:
        """How many extents the whole range has."""
        return -(-self._total // self._extent_blocks)

    @property
    def extent_blocks(self) -> int:
        """Blocks of an extent."""
        return self._extent_blocks

    @property
    def reserved(self) -> int:
        """Blocks that are never handed out."""
        return self._reserved

    @property
    def capacity(self) -> int:
        """Blocks that can be taken at once: all but a reserved one."""
        return self._limit - self._reserved

    @property
    def free(self) -> int:
        """Blocks that can be taken now."""
        return max(0, self.capacity - len(self._taken))

    @property
    def taken(self) -> int:
        """Blocks that have an owner; more than `capacity` for a while after the limit fell."""
        return len(self._taken)

    @property
    def committed(self) -> int:
        """Extents that are backed by memory."""
        return len(self._free)

    @property
    def backed(self) -> tuple[int, ...]:
        """Their numbers."""
        return tuple(self._free)

    @property
    def unbacked(self) -> list[int]:
        """The others', in the order in which they will be."""
        return self._uncommitted[::-1]

    @property
    def ready(self) -> int:
        """Blocks that can be taken without more memory."""
        return min(self.free, sum(map(len, self._free.values())))

    def set_limit(self, limit: int) -> None:
        """Let `limit` blocks be in use at once, a reserved one among them.

        No more extents than hold that many are ever committed; those beyond are for the caller to
        empty and return.
        """
        self._limit = max(2, min(limit, self._total))

    def take(self, count: int) -> list[int]:
        """Take `count` blocks; the caller has checked `free`."""
        if count > self.free:
            raise ValueError(f"{count} blocks asked, {self.free} free of {self.capacity}")
        # Commit first: it is the one act that can fail, and nothing has been handed out then.
        room = sum(map(len, self._free.values()))
        while room < count:
            room += self._commit_next()
        fullest_first = [(len(numbers), e) for e, numbers in self._free.items() if numbers]
        heapify(fullest_first)
        taken: list[int] = []
        while len(taken) < count:
            numbers = self._free[heappop(fullest_first)[1]]
            while numbers and len(taken) < count:
                taken.append(numbers.pop())
        self._taken.update(taken)
        return taken

    def back(self, count: int, extents: int) -> bool:
        """Whether `count` blocks, or all that are free, can be taken without more memory, once less
        than so many more extents are committed; if not, that many were."""
        room, count = sum(map(len, self._free.values())), min(count, self.free)
        while room < count and extents:
            room += self._commit_next()
            extents -= 1
        return extents > 0

    def give(self, blocks: Seq[int]) -> None:
        """Give blocks back."""
        for block in blocks:
            if block not in self._taken:
                raise ValueError(f"block {block} is given back but was not taken")
            self._taken.remove(block)
            self._free[block // self._extent_blocks].append(block)

    def compact(self) -> dict[int, int]:
        """Move blocks out of the emptiest extents; old number to new, for the caller to copy.

        Afterwards no more extents than the taken blocks need have any in them.
        """
        needed = max(1, -(-(len(self._taken) + self._reserved) // self._extent_blocks))
        fullest = sorted(self._free, key=lambda extent: (extent != 0, len(self._free[extent])))
        kept, emptied = fullest[:needed], set(fullest[needed:])
        places = [block for extent in kept for block in reversed(self._free[extent])]
        movers = sorted(b for b in self._taken if b // self._extent_blocks in emptied)
        # The last extent of the range may be a short one, so room is not certain.
        moves = dict(zip(movers, places, strict=False))
        for old, new in moves.items():
            self._free[new // self._extent_blocks].remove(new)
            self._free[old // self._extent_blocks].append(old)
        self._taken.difference_update(moves)
        self._taken.update(moves.values())
        return moves

    def return_empty_extents(self) -> int:
        """Give the memory of extents without a taken block back to the system; how many."""
        empty = [e for e in self._free if e and len(self._free[e]) == self._size(e)]
        for extent in empty:
            del self._free[extent]
            self._uncommitted.append(extent)
            self._backing.decommit(extent)
        self._uncommitted.sort(reverse=True)
        return len(empty)

    def check(self) -> None:
        """A block is exactly one of: reserved, taken, free and committed, uncommitted."""
        free = [block for numbers in self._free.values() for block in numbers]
        assert len(free) == len(set(free)), "a block is free twice"
        assert not self._taken.intersection(free), "a block is both taken and free"
        if self._reserved:
            assert 0 not in self._taken and 0 not in free, "the reserved block was handed out"
        assert not set(self._free).intersection(self._uncommitted), "an extent is in two states"
        assert len(self._free) + len(self._uncommitted) == self.extents, "an extent is lost"
        assert all(b // self._extent_blocks in self._free for b in self._taken), "unbacked block"
        committed = sum(self._size(extent) for extent in self._free)
        assert len(free) + len(self._taken) + self._reserved == committed, "a block is lost"

    def _size(self, extent: int) -> int:
        return min(self._extent_blocks, self._total - extent * self._extent_blocks)

    def _commit_next(self) -> int:
        """Back one more extent with memory; how many blocks there are in it."""
        extent = self._uncommitted[-1]
        self._backing.commit(extent)  # may fail; nothing has changed then
        self._uncommitted.pop()
        start = extent * self._extent_blocks
        self._free[extent] = list(range(start + self._size(extent) - 1, start - 1, -1))
        return len(self._free[extent])
