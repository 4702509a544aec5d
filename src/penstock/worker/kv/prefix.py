"""Computed KV that can be found again by its tokens, and shared by whoever needs it.

A block that is full and computed is inserted under its key (`hashes.py`). Sequences with the same
beginning hold the same blocks. Only full blocks have keys, and nothing is ever written into a block
that has one: there is nothing to copy before a write.

    free ──take──▶ held by one ──insert──▶ held by any number ──give──▶ evictable, least recently
      ▲               │ give                                               │    used first
      └───────────────┴────────────────────────────────────────────────────┘ take, when free ones
                                                                              are used up

Numbers only: it holds no tensor and knows no requests. The pool sees evictable blocks as taken;
here they count as free, since they are evicted as soon as anybody needs room.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Sequence as Seq

    from penstock.worker.kv.blocks import BlockPool


class PrefixCache:
    """A pool's blocks with their keys, holders and the order in which they are evicted."""

    def __init__(self, pool: BlockPool, uses: Iterator[int] | None = None) -> None:
        self._pool = pool
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._holders: dict[int, int] = {}  # how many; no block has none
        # Blocks without a holder, least recently used first, with the time of that use. Not a plain
        # dict: finding its first key walks over all entries deleted before it.
        self._evictable: OrderedDict[int, int] = OrderedDict()
        self._uses = itertools.count() if uses is None else uses
        self.evicted = 0

    @property
    def free(self) -> int:
        """Blocks that can be taken now."""
        return max(0, self.capacity - len(self._holders))

    @property
    def capacity(self) -> int:
        """Blocks that can be held at once."""
        return self._pool.capacity

    @property
    def held(self) -> int:
        """Blocks that somebody holds; more than `capacity` for a while after the limit fell."""
        return len(self._holders)

    @property
    def evictable(self) -> int:
        """Blocks that nobody holds and that can be found."""
        return len(self._evictable)

    @property
    def oldest_use(self) -> int | None:
        """When the block was last used that is evicted next."""
        return next(iter(self._evictable.values()), None)

    def find(self, key: bytes) -> int | None:
        """The block known under a key."""
        return self._blocks.get(key)

    def is_held(self, block: int) -> bool:
        """Whether somebody has it, so that sharing it costs no room."""
        return block in self._holders

    def is_inserted(self, block: int) -> bool:
        """Whether it has a key, so that it must not be written."""
        return block in self._keys

    def take(self, count: int) -> list[int]:
        """New blocks with one holder; the caller has checked `free`."""
        if count > self.free:
            raise ValueError(f"{count} blocks asked, {self.free} free of {self.capacity}")
        self._evict_oldest(count - self._pool.free)
        blocks = self._pool.take(count)
        self._holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def recycle(self, count: int) -> list[int]:
        """So many evictable blocks or all there are, the least recently used, as new ones with one
        holder: for those who cannot have more memory now."""
        count = min(count, len(self._evictable))
        self._evict_oldest(count)
        blocks = self._pool.take(count)
        self._holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def share(self, block: int) -> None:
        """One more holder of a known block."""
        self._evictable.pop(block, None)
        self._holders[block] = self._holders.get(block, 0) + 1

    def insert(self, block: int, key: bytes) -> bool:
        """A held block is full and computed; whether it is found from now on. If there is such a
        one already, that stays."""
        assert block in self._holders, "nobody holds it"
        if key in self._blocks or block in self._keys:
            return False
        self._blocks[key] = block
        self._keys[block] = key
        return True

    def give(self, blocks: Seq[int]) -> None:
        """One holder less of each. The last of a sequence is the first to be evicted."""
        for block in reversed(blocks):
            if block not in self._holders:
                raise ValueError(f"block {block} is given back but nobody holds it")
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            if block in self._keys:
                self._evictable[block] = next(self._uses)
            else:
                self._pool.give([block])

    def touch(self, blocks: Iterable[int]) -> None:
        """Used now, in the order of a sequence: of those that are evictable, its end goes first."""
        for block in reversed(list(blocks)):
            if block in self._evictable:
                del self._evictable[block]
                self._evictable[block] = next(self._uses)

    def held_blocks(self) -> Iterable[int]:
        """All that somebody holds."""
        return self._holders.keys()

    def evictable_blocks(self) -> tuple[int, ...]:
        """All that nobody holds and that can be found, the least recently used first."""
        return tuple(self._evictable)

    def evict(self, blocks: Iterable[int]) -> None:
        """Let these be found no longer; those that somebody holds stay."""
        for block in blocks:
            if block in self._evictable:
                self._evict_one(block)

    def withdraw(self, block: int) -> None:
        """Let a held block be found no longer, so that its holder may write it."""
        assert self._holders.get(block) == 1, "somebody else reads it"
        if block in self._keys:
            self._forget(block)

    def shrink(self) -> None:
        """Evict what the pool's limit has no room for."""
        self._evict_oldest(self._pool.taken - self.capacity)

    def clear(self) -> int:
        """Evict all that nobody holds, and let nothing that is held be found again; how many."""
        self._blocks.clear()
        self._keys.clear()
        given = list(self._evictable)
        self._evictable.clear()
        self._pool.give(given)
        return len(given)

    def rename(self, moves: dict[int, int]) -> None:
        """Blocks have been copied elsewhere: old number to new."""
        self._holders = {moves.get(block, block): n for block, n in self._holders.items()}
        self._evictable = OrderedDict(
            (moves.get(block, block), used) for block, used in self._evictable.items()
        )
        self._keys = {moves.get(block, block): key for block, key in self._keys.items()}
        self._blocks = {key: moves.get(block, block) for key, block in self._blocks.items()}

    def check(self, held: Iterable[int]) -> None:
        """`held` has each block once for every holder."""
        self._pool.check()
        holders: dict[int, int] = {}
        for block in held:
            holders[block] = holders.get(block, 0) + 1
        assert holders == self._holders, "holders are miscounted"
        assert not self._evictable.keys() & self._holders.keys(), (
            "a block is both held and evictable"
        )
        assert len(self._evictable) + len(self._holders) == self._pool.taken, "a block has no owner"
        assert self._evictable.keys() <= self._keys.keys(), (
            "a block is evictable that cannot be found"
        )
        for key, block in self._blocks.items():
            assert self._keys[block] == key, "a key leads to another block"

    def _evict_oldest(self, count: int) -> None:
        for _ in range(min(count, len(self._evictable))):
            self._evict_one(next(iter(self._evictable)))

    def _evict_one(self, block: int) -> None:
        del self._evictable[block]
        self._forget(block)
        self._pool.give([block])
        self.evicted += 1

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block)
        if self._blocks.get(key) == block:
            del self._blocks[key]
