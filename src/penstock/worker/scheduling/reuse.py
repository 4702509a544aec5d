"""KV that exists is not computed again.

A sequence begins with the blocks that are known for its first tokens, here or in a tier, and lets
an older one that is computing the same beginning go ahead. What it computes itself, others find.
Numbers and keys only: it holds no tensor, and knows sequences but not the order they run in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.worker.kv.prefix import Chain, root_key
from penstock.worker.scheduling.sequence import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Protocol

    from penstock.worker.kv.prefix import PrefixCache
    from penstock.worker.scheduling.sequence import Sequence

    class Tier(Protocol):
        """KV that is kept elsewhere, by the keys of its blocks."""

        def keep(self, key: bytes) -> None: ...

        def covers(self, keys: list[bytes]) -> int: ...

        def fetch(self, keys: list[bytes]) -> int: ...

        def drop(self, ticket: int) -> None: ...

        def touch(self, keys: list[bytes]) -> None: ...


class Reuse:
    """What sequences find, wait for and leave behind."""

    def __init__(self, cache: PrefixCache, tier: Tier | None, block_tokens: int) -> None:
        self._cache = cache
        self._tier = tier
        self._block_tokens = block_tokens

    def begin(self, sequence: Sequence) -> None:
        """It has come in."""
        root = root_key(sequence.request.salt)
        sequence.chain = Chain(root, sequence.tokens, self._block_tokens)

    def find(self, sequence: Sequence) -> list[int]:
        """The known blocks of its first tokens."""
        found: list[int] = []
        while (block := self._known(sequence, len(found))) is not None:
            found.append(block)
        return found

    def use(self, sequence: Sequence, blocks: int) -> None:
        """Its first blocks are computed and known."""
        sequence.known = blocks
        sequence.computed = blocks * self._block_tokens
        if not sequence.preempted:  # what it had computed itself is not counted
            sequence.reused = sequence.computed

    def fetch(self, sequence: Sequence) -> None:
        """Have the blocks brought that the tier has, from the first that is not here."""
        chain = sequence.chain
        if self._tier is None or chain is None or sequence.wants_prompt_logits:
            return
        last = (len(sequence.tokens) - 1) // self._block_tokens
        keys = [chain.key(index) for index in range(sequence.known, last)]
        if count := self._tier.covers(keys):
            sequence.ticket = self._tier.fetch(keys[:count])
            sequence.fetched_from = sequence.known
            sequence.awaited = sequence.known + count

    def arrived(self, sequence: Sequence, *, more: bool) -> None:
        """Its next block is in its place; or, without more, no others will come."""
        if not more:
            sequence.ticket = None
            return
        index = sequence.computed // self._block_tokens
        assert sequence.chain is not None
        self._cache.know(sequence.blocks[index], sequence.chain.key(index))
        self.use(sequence, index + 1)
        if index + 1 == sequence.awaited:
            sequence.ticket = None

    def catch_up(self, sequence: Sequence, older: Iterable[Sequence]) -> bool:
        """Use what others have computed by now; whether an older one is at the next block."""
        while sequence.computed % self._block_tokens == 0:
            index = sequence.computed // self._block_tokens
            block = self._known(sequence, index)
            if block is None:
                return self._is_coming(sequence, index, older)
            self._cache.share(block)
            self._cache.give([sequence.blocks[index]])
            sequence.blocks[index] = block
            self.use(sequence, index + 1)
        return False

    def make_known(self, sequence: Sequence) -> None:
        """Let others find the blocks that are full and whose tokens are here."""
        size = self._block_tokens
        if sequence.chain is None:
            return
        while (end := (sequence.known + 1) * size) <= sequence.computed:
            if sequence.tokens[end - 1] == UNKNOWN:
                return
            block = sequence.blocks[sequence.known]
            self._cache.know(block, sequence.chain.key(sequence.known))
            sequence.known += 1

    def end(self, sequence: Sequence) -> None:
        """It is about to leave its blocks: they were used until now, and none need be brought."""
        if self._tier is None or sequence.chain is None:
            return
        self._tier.touch([sequence.chain.key(index) for index in range(sequence.known)])
        if sequence.ticket is not None:
            self._tier.drop(sequence.ticket)
            sequence.ticket = None

    def _known(self, sequence: Sequence, index: int) -> int | None:
        """The known block that could be the sequence's at an index."""
        chain = sequence.chain
        # The last token is computed in any case: its row gives the next one.
        last = (len(sequence.tokens) - 1) // self._block_tokens
        if chain is None or sequence.wants_prompt_logits or index >= last:
            return None
        return self._cache.find(chain.key(index))

    def _is_coming(self, sequence: Sequence, index: int, older: Iterable[Sequence]) -> bool:
        """Whether an older sequence is about to compute the same block."""
        end = (index + 1) * self._block_tokens
        chain = sequence.chain
        if chain is None or sequence.wants_prompt_logits or end >= len(sequence.tokens):
            return False
        for other in older:
            ahead = not other.decoding and other.computed < end < len(other.tokens)
            if ahead and other.chain is not None and other.chain.key(index) == chain.key(index):
                return True
        return False
