"""Computed KV that can be found again by its tokens, and shared by whoever needs it.

A block that is full and computed is known under a key: a hash over the key of the block before it
and its own tokens, so that a key stands for everything from the first token on. Sequences with the
same beginning hold the same blocks. Only full blocks have keys, and nothing is ever written into a
block that has one: there is nothing to copy before a write.

    free ──take──▶ held by one ──know──▶ held by any number ──give──▶ kept, least recently used
      ▲               │ give                                              │      first to go
      └───────────────┴───────────────────────────────────────────────────┘ take, when free ones
                                                                             are used up

Numbers only: it holds no tensor and knows no requests. The pool sees kept blocks as taken; here
they count as free, since they are given up as soon as anybody needs room.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Seq

    from penstock.worker.kv.blocks import BlockPool

KEY_BYTES = 16


def root_key(salt: bytes = b"") -> bytes:
    """Where chains begin: with another salt they have no key in common."""
    return hashlib.blake2b(salt, digest_size=KEY_BYTES).digest()


class Chain:
    """The keys of one sequence's blocks, as far as anybody has asked for them."""

    def __init__(self, root: bytes, tokens: list[int], block_tokens: int) -> None:
        self._root = root
        self._tokens = tokens  # grows; what is in it does not change
        self._block_tokens = block_tokens
        self._keys: list[bytes] = []

    def key(self, index: int) -> bytes:
        """The key of a block; its tokens are all known."""
        while len(self._keys) <= index:
            start = len(self._keys) * self._block_tokens
            tokens = array("i", self._tokens[start : start + self._block_tokens])
            assert len(tokens) == self._block_tokens, "a block that is not full has no key"
            parent = self._keys[-1] if self._keys else self._root
            digest = hashlib.blake2b(parent + tokens.tobytes(), digest_size=KEY_BYTES)
            self._keys.append(digest.digest())
        return self._keys[index]


class PrefixCache:
    """A pool's blocks with their keys, holders and the order in which they are given up."""

    def __init__(self, pool: BlockPool, known: Callable[[bytes], None] | None = None) -> None:
        self._pool = pool
        self._tell = known  # of every new key
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._holders: dict[int, int] = {}  # how many; no block has none
        # Known and held by nobody, least recently used first. To take the first of a plain dict
        # costs as much as it has lost before.
        self._kept: OrderedDict[int, None] = OrderedDict()
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
    def kept(self) -> int:
        """Blocks that nobody holds and that can be found."""
        return len(self._kept)

    def find(self, key: bytes) -> int | None:
        """The block known under a key."""
        return self._blocks.get(key)

    def is_held(self, block: int) -> bool:
        """Whether somebody has it, so that sharing it costs no room."""
        return block in self._holders

    def is_known(self, block: int) -> bool:
        """Whether it has a key, so that it must not be written."""
        return block in self._keys

    def take(self, count: int) -> list[int]:
        """New blocks with one holder; the caller has checked `free`."""
        if count > self.free:
            raise ValueError(f"{count} blocks asked, {self.free} free of {self.capacity}")
        self._give_up(count - self._pool.free)
        blocks = self._pool.take(count)
        self._holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def recycle(self, count: int) -> list[int]:
        """So many kept blocks or all there are, the least recently used, as new ones with one
        holder: for those who cannot have more memory now."""
        count = min(count, len(self._kept))
        self._give_up(count)
        blocks = self._pool.take(count)
        self._holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def share(self, block: int) -> None:
        """One more holder of a known block."""
        self._kept.pop(block, None)
        self._holders[block] = self._holders.get(block, 0) + 1

    def know(self, block: int, key: bytes) -> None:
        """A held block is full and computed. If there is such a one already, that stays."""
        assert block in self._holders, "nobody holds it"
        if key not in self._blocks and block not in self._keys:
            self._blocks[key] = block
            self._keys[block] = key
            if self._tell is not None:
                self._tell(key)

    def give(self, blocks: Seq[int]) -> None:
        """One holder less of each. The last of a chain is the first to be given up."""
        for block in reversed(blocks):
            if block not in self._holders:
                raise ValueError(f"block {block} is given back but nobody holds it")
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            if block in self._keys:
                self._kept[block] = None
            else:
                self._pool.give([block])

    def touch(self, blocks: Iterable[int]) -> None:
        """Used now, in the order of a chain: of those that are kept, its end goes first."""
        for block in reversed(list(blocks)):
            if block in self._kept:
                self._kept.move_to_end(block)

    def held_blocks(self) -> Iterable[int]:
        """All that somebody holds."""
        return self._holders.keys()

    def kept_blocks(self) -> tuple[int, ...]:
        """All that nobody holds and that can be found, the least recently used first."""
        return tuple(self._kept)

    def give_up(self, blocks: Iterable[int]) -> None:
        """Do not keep these any longer; those that somebody holds stay."""
        for block in blocks:
            if block in self._kept:
                self._give_up_one(block)

    def shrink(self) -> None:
        """Give up what the pool's limit has no room for."""
        self._give_up(self._pool.taken - self.capacity)

    def clear(self) -> int:
        """Give up all that nobody holds, and let nothing that is held be found again; how many."""
        self._blocks.clear()
        self._keys.clear()
        given = list(self._kept)
        self._kept.clear()
        self._pool.give(given)
        return len(given)

    def rename(self, moves: dict[int, int]) -> None:
        """Blocks have been copied elsewhere: old number to new."""
        self._holders = {moves.get(block, block): n for block, n in self._holders.items()}
        self._kept = OrderedDict.fromkeys(moves.get(block, block) for block in self._kept)
        self._keys = {moves.get(block, block): key for block, key in self._keys.items()}
        self._blocks = {key: moves.get(block, block) for key, block in self._blocks.items()}

    def check(self, held: Iterable[int]) -> None:
        """`held` has each block once for every holder."""
        self._pool.check()
        holders: dict[int, int] = {}
        for block in held:
            holders[block] = holders.get(block, 0) + 1
        assert holders == self._holders, "holders are miscounted"
        assert not self._kept.keys() & self._holders.keys(), "a block is both held and kept"
        assert len(self._kept) + len(self._holders) == self._pool.taken, "a block has no owner"
        assert self._kept.keys() <= self._keys.keys(), "a block is kept that cannot be found"
        for key, block in self._blocks.items():
            assert self._keys[block] == key, "a key leads to another block"

    def _give_up(self, count: int) -> None:
        for _ in range(min(count, len(self._kept))):
            self._give_up_one(next(iter(self._kept)))

    def _give_up_one(self, block: int) -> None:
        del self._kept[block]
        self._forget(block)
        self._pool.give([block])
        self.evicted += 1

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block)
        if self._blocks.get(key) == block:
            del self._blocks[key]
