"""A step's work and its limits: what the scheduler decides and an executor runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.wire import Reserve
from penstock.worker.scheduling.gate import StepShape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.worker.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may hold."""

    tokens: int
    sequences: int
    block_tokens: int
    logit_rows: int  # rows whose logits are computed: bounds the [rows, vocabulary] matrix
    reserve: Reserve = Reserve.EXPECTED
    # Rows of a chunk times the context they see: what attention over it may take.
    pairs: int = 1 << 40


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens `start .. start + count` of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """The last known token is in it, so its row gives the next one."""
        return self.end == len(self.sequence.tokens)

    @property
    def logit_rows(self) -> int:
        """How many of its rows need logits."""
        return self.count if self.sequence.wants_prompt_logits else int(self.samples)


@dataclass(slots=True)
class Plan:
    """One step's work: sequences that decode first, then chunks, each group by arrival."""

    decodes: list[Slice] = field(default_factory=list)
    chunks: list[Slice] = field(default_factory=list)

    @property
    def slices(self) -> list[Slice]:
        """All of it, in batch order."""
        return self.decodes + self.chunks

    @property
    def tokens(self) -> int:
        """Rows of the forward."""
        return len(self.decodes) + self.chunk_tokens

    @property
    def chunk_tokens(self) -> int:
        """Rows that are not decodes."""
        return sum(piece.count for piece in self.chunks)

    def written(self, block_tokens: int) -> Iterator[int]:
        """The blocks that it writes."""
        for piece in self.slices:
            last = (piece.end - 1) // block_tokens
            yield from piece.sequence.blocks[piece.start // block_tokens : last + 1]

    @property
    def shape(self) -> StepShape:
        """What its cost depends on."""
        shape = StepShape()
        for piece in self.slices:
            shape = shape.plus(piece.count, piece.end, piece.logit_rows)
        return shape
