"""Blocks of several sizes over one budget of bytes.

Every group has a pool of its own, whose blocks have one size, and a prefix cache over it. The
budget is assigned to pools in whole extents: a pool that needs more gets what is not assigned, then
it evicts, and an extent comes from another pool when that has older blocks to evict, or when it has
nothing to evict itself. The extent is emptied by moving its blocks within their own pool.

Counts and numbers only. What `capacity_bytes` promises can always be held, however it is spread
over the groups: with several of them, whole extents waste up to one extent in each.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.worker.kv.blocks import BlockPool
from penstock.worker.kv.prefix import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Sequence


class GroupMemory(Protocol):
    """The memory behind one group's blocks."""

    blocks: int
    extent_blocks: int
    step_extents: int | None  # that steps may wait for at a time; None: any number

    @property
    def unit_bytes(self) -> int:
        """Bytes of an extent."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""

    def commit(self, extent: int) -> None: ...

    def decommit(self, extent: int) -> None: ...

    def copy(self, moves: dict[int, int]) -> None:
        """Copy whole blocks, old number to new."""


class MoveListener(Protocol):
    """Who must know when blocks move."""

    def before_moves(self) -> None:
        """Blocks are about to move: nothing may be copying them."""

    def moved(self, group: int, moves: dict[int, int]) -> None:
        """Blocks have been copied elsewhere: old number to new."""


@dataclass(slots=True)
class _Group:
    memory: GroupMemory
    pool: BlockPool
    cache: PrefixCache
    extents: int = 0  # assigned to it

    @property
    def min_extents(self) -> int:
        """As many as hold what is in use, and the two blocks that a pool has at least."""
        needed = max(2, self.cache.held + self.pool.reserved)
        return -(-needed // self.memory.extent_blocks)

    def assign(self, extents: int) -> None:
        self.extents = extents
        self.pool.set_limit(extents * self.memory.extent_blocks)


class GroupedPools:
    """One budget over the pools of all groups."""

    def __init__(self, memories: Sequence[GroupMemory], limit_bytes: int) -> None:
        uses = itertools.count()
        self._groups: list[_Group] = []
        for memory in memories:
            pool = BlockPool(memory.blocks, memory.extent_blocks, memory)
            group = _Group(memory, pool, PrefixCache(pool, uses))
            group.assign(group.min_extents)
            self._groups.append(group)
        self._listener: MoveListener | None = None
        self.limit_bytes = 0
        self.set_limit(limit_bytes)

    def listen(self, listener: MoveListener) -> None:
        """Tell this one of moves."""
        self._listener = listener

    @property
    def caches(self) -> list[PrefixCache]:
        """One for each group."""
        return [group.cache for group in self._groups]

    @property
    def block_bytes(self) -> list[int]:
        """Of each group."""
        return [group.memory.block_bytes for group in self._groups]

    @property
    def overhead_bytes(self) -> int:
        """Of the limit, what no sequence can hold: blocks that are never handed out, and what whole
        extents of several groups may waste."""
        if len(self._groups) == 1:
            return self._groups[0].memory.block_bytes
        return sum(max(g.memory.unit_bytes, 2 * g.memory.block_bytes) for g in self._groups)

    @property
    def unit_bytes(self) -> int:
        """The step in which a larger limit is of use."""
        return self._groups[0].memory.unit_bytes if len(self._groups) == 1 else 1

    @property
    def capacity_bytes(self) -> int:
        """What can be held at once, however it is spread over the groups.

        Where everything that has addresses is within the limit, no extent is wasted.
        """
        if len(self._groups) == 1:
            return self._groups[0].pool.capacity * self._groups[0].memory.block_bytes
        if self.limit_bytes >= self._addressed_bytes:
            sizes = enumerate(self.block_bytes)
            return sum(self.blocks(number) * size for number, size in sizes)
        return max(0, self.limit_bytes - self.overhead_bytes)

    @property
    def _addressed_bytes(self) -> int:
        return sum(group.pool.extents * group.memory.unit_bytes for group in self._groups)

    @property
    def held_bytes(self) -> int:
        """Of blocks that somebody holds."""
        return sum(group.cache.held * group.memory.block_bytes for group in self._groups)

    @property
    def committed_bytes(self) -> int:
        """Memory behind the blocks."""
        return sum(group.pool.committed * group.memory.unit_bytes for group in self._groups)

    def set_limit(self, limit_bytes: int) -> None:
        """Let so many bytes be committed from now on, but two blocks of each group at least; `trim`
        gives back what is beyond."""
        least = sum(-(-2 // g.memory.extent_blocks) * g.memory.unit_bytes for g in self._groups)
        usable = limit_bytes // self.unit_bytes * self.unit_bytes
        self.limit_bytes = max(least, min(usable, self._addressed_bytes))
        if len(self._groups) == 1:
            self._groups[0].assign(self.limit_bytes // self.unit_bytes)

    def limit_for(self, size_bytes: int) -> int:
        """The limit with which so much can be held."""
        needed = size_bytes + self.overhead_bytes
        return -(-needed // self.unit_bytes) * self.unit_bytes

    def blocks(self, group: int) -> int:
        """Blocks that a group has addresses for."""
        return self._groups[group].memory.blocks - self._groups[group].pool.reserved

    def unheld(self, group: int) -> int:
        """Of those, blocks that nobody holds."""
        return self.blocks(group) - self._groups[group].cache.held

    def take(self, group: int, count: int) -> list[int]:
        """New blocks of a group; the caller has checked that they are within `capacity_bytes`.

        Memory may fail; nothing is taken then.
        """
        if len(self._groups) > 1:
            self._provide(self._groups[group], count)
        return self._groups[group].cache.take(count)

    def back(self, group: int, count: int) -> bool:
        """Whether `take` would commit nothing that steps wait for; if not, a part of it is
        committed. Memory may fail."""
        mine = self._groups[group]
        if (extents := mine.memory.step_extents) is None:
            return True
        if len(self._groups) > 1:
            self._provide(mine, count)
        return mine.pool.back(count, extents)

    def trim(self) -> None:
        """Evict what is beyond the limit, and give its memory back."""
        while self._assigned_bytes() > self.limit_bytes:
            spare = [group for group in self._groups if group.extents > group.min_extents]
            if not spare or len(self._groups) == 1:
                break
            group = min(spare, key=_age)
            group.assign(group.extents - 1)
        for group in self._groups:
            group.cache.shrink()
        if any(group.pool.committed > group.extents for group in self._groups):
            self.compact()

    def compact(self) -> None:
        """Move what is in use together and give all other memory back."""
        if self._listener is not None:
            self._listener.before_moves()
        for number in range(len(self._groups)):
            self._compact(number)

    def check(self, held: Sequence[list[int]]) -> None:
        """`held` has for each group each block once for every holder."""
        for group, blocks in zip(self._groups, held, strict=True):
            group.cache.check(blocks)
            assert group.pool.committed <= group.extents or len(self._groups) == 1
        if len(self._groups) > 1 and self.held_bytes <= self.capacity_bytes:
            least = sum(g.min_extents * g.memory.unit_bytes for g in self._groups)
            assert least <= self.limit_bytes, "what is promised could not be held"

    def _assigned_bytes(self) -> int:
        return sum(group.extents * group.memory.unit_bytes for group in self._groups)

    def _provide(self, group: _Group, count: int) -> None:
        """See that a group can take so many blocks."""
        unit, most = group.memory.unit_bytes, group.pool.extents
        while group.pool.free < count and group.extents < most:
            if self._assigned_bytes() + unit <= self.limit_bytes:
                group.assign(group.extents + 1)
                continue
            donor = self._donor(group, count)
            if donor is None:
                break
            donor.assign(donor.extents - 1)
            donor.cache.shrink()
            if self._listener is not None:
                self._listener.before_moves()
            self._compact(self._groups.index(donor))

    def _donor(self, group: _Group, count: int) -> _Group | None:
        """Who gives it an extent: the one with the oldest blocks; None: it evicts its own."""
        others = [g for g in self._groups if g is not group and g.extents > g.min_extents]
        if not others:
            return None
        oldest = min(others, key=_age)
        must = group.cache.free < count
        return oldest if must or _age(oldest) < _age(group) else None

    def _compact(self, number: int) -> None:
        group = self._groups[number]
        moves = group.pool.compact()
        if moves:
            group.memory.copy(moves)
            group.cache.rename(moves)
            if self._listener is not None:
                self._listener.moved(number, moves)
        group.pool.return_empty_extents()


def _age(group: _Group) -> float:
    """When the block was last used that the group evicts next; before all, if it has free ones."""
    if group.pool.capacity - group.pool.taken >= group.memory.extent_blocks:
        return -1
    oldest = group.cache.oldest_use
    return float("inf") if oldest is None else oldest
