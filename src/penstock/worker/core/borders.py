"""Where a sequence's recurrent state is kept for others, and for itself. No torch.

Of KV every block can be gone on from, of a state only where there is a snapshot of it. A step
writes those that fall into its rows in passing. They are taken, always at the end of a block:

    a little before the end of a prompt    the next turn of a conversation begins like this one
    where another prompt branches off      somebody waits for it, or KV is known as far as there
    every so many tokens                   so far apart that it takes no more than the KV between
    at the latest block of an answer       until there is a later one: to go on from after a step
                                           that failed, and for the next turn

They get what memory is left when all else is planned, and are evicted as blocks are.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.worker.core.plan import Plan, Slice
    from penstock.worker.core.sequence import Sequence
    from penstock.worker.kv.cache import KvCache
    from penstock.worker.kv.tables import Match

# Of a prompt's end: what opens an answer there may not be in the next turn's prompt.
OPENING_TOKENS = 8
# A small state is not kept more often than this.
MIN_BLOCKS_APART = 4


class Borders:
    """Chooses places for snapshots over the states of a cache."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._size = kv.block_tokens
        block_bytes = sum(group.block_bytes for group in kv.groups)
        apart = -(-kv.states.slot_bytes // block_bytes) if block_bytes else 1 << 30
        self._apart = self._size * max(MIN_BLOCKS_APART, apart)

    @property
    def any(self) -> bool:
        """Whether there is a state at all."""
        return self._kv.states.slot_bytes > 0

    def withdraw(self, running: Iterable[Sequence]) -> None:
        """Forget what was planned for a step that did not run."""
        for sequence in running:
            self._kv.states.retract(sequence.kv.state, sequence.computed)

    def joins(self, sequence: Sequence, match: Match, running: Iterable[Sequence]) -> None:
        """A sequence was admitted: note where it branches off from what is known or on its way."""
        if not self.any:
            return
        sequence.junctions.clear()
        if match.known > match.count:
            sequence.junctions.add(match.known * self._size)
        for other in running:
            junction = self._junction(other, sequence)
            if junction > max(sequence.computed, other.computed):
                other.junctions.add(junction)

    def awaits(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether an older one is at what the sequence would compute next, so that it had better
        wait: at the next block; where there is a state, on the way to one that it can use."""
        older = itertools.takewhile(lambda other: other is not sequence, running)
        ahead = [other for other in older if not (other.decoding or other.complete)]
        if not self.any:
            return self._awaits_block(sequence, ahead)
        for other in ahead:
            junction = self._junction(other, sequence)
            if junction > max(sequence.computed, other.computed) and junction in other.junctions:
                return True
        return False

    def _awaits_block(self, sequence: Sequence, ahead: list[Sequence]) -> bool:
        index, rest = divmod(sequence.computed, self._size)
        end = (index + 1) * self._size
        if rest or end > sequence.reusable_tokens:
            return False
        return any(
            other.computed < end < len(other.tokens)
            and self._kv.same_block(other.kv, sequence.kv, index)
            for other in ahead
        )

    def extend(self, plan: Plan, sequences: Mapping[int, Sequence]) -> None:
        """Have the steps' slices write snapshots, as far as there is room beside everything."""
        if not self.any:
            return
        plan.decodes = [
            self._decoding(piece, sequences[piece.request_id]) for piece in plan.decodes
        ]
        plan.chunks = [self._chunk(piece, sequences[piece.request_id]) for piece in plan.chunks]

    def _decoding(self, piece: Slice, sequence: Sequence) -> Slice:
        if piece.end % self._size or self._kv.states.prompts_differ:
            return piece
        return self._writing(piece, sequence, [piece.end], passing=piece.end % self._apart > 0)

    def _chunk(self, piece: Slice, sequence: Sequence) -> Slice:
        end = max(0, sequence.prompt_tokens - OPENING_TOKENS) // self._size * self._size
        first = (piece.start // self._apart + 1) * self._apart
        places = {end, *sequence.junctions, *range(first, piece.end + 1, self._apart)}
        if self._kv.states.prompts_differ:
            places = {place for place in places if place <= sequence.prompt_tokens}
        return self._writing(piece, sequence, sorted(places), passing=False)

    def _writing(
        self, piece: Slice, sequence: Sequence, places: list[int], *, passing: bool
    ) -> Slice:
        kv, handle = self._kv, sequence.kv
        # The last token may still be on its way, and then its block has no key.
        inside = [t for t in places if piece.start < t <= min(piece.end, sequence.known_tokens)]
        for tokens in inside:
            known = kv.states.find(handle.hashes.key(tokens // self._size - 1))
            if not known and kv.states.room(kv.free_bytes):
                kv.states.snapshot(handle.state, tokens, passing=passing)
        return replace(piece, snapshots=tuple(handle.state.pending))

    def _junction(self, one: Sequence, other: Sequence) -> int:
        """Tokens that two sequences have in common, in whole blocks that both can go on behind."""
        blocks = min(len(one.tokens) - 1, other.reusable_tokens) // self._size
        low, high = 0, blocks
        while low < high:
            middle = (low + high + 1) // 2
            if self._kv.same_block(one.kv, other.kv, middle - 1):
                low = middle
            else:
                high = middle - 1
        return low * self._size
