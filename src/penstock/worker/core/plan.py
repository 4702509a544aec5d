"""A step's work as data: numbers and ids, so that another process could run it.

What a step needs beside a plan (sampling parameters, tokens that penalties count, grammars) whoever
runs it has by request id.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.wire import Reserve
from penstock.worker.core.gate import StepShape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.wire import TokenIds
    from penstock.worker.kv.states.slots import Snapshot

    Table = NDArray[np.int32]

_NO_STATE = np.zeros(1, np.int32)

# A token that has been sampled and is still on its way here from the device.
UNKNOWN = -1


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

    def within(self, tokens: int, drafts: int) -> StepLimits:
        """The same with fewer tokens: never as many sequences as tokens."""
        sequences = max(1, min(self.sequences, tokens // 2))
        rows = self.logit_rows_for(sequences, drafts)
        return replace(self, tokens=tokens, sequences=sequences, logit_rows=rows)

    @classmethod
    def logit_rows_for(cls, sequences: int, drafts: int) -> int:
        """Beside a row for each sequence as many again, for log-probabilities of prompts and for
        drafts; for few sequences enough for the `drafts` of one."""
        return sequences + max(sequences, drafts + 1 if drafts else 0)

    def check(self) -> None:
        """A chunk and a prompt's log-probabilities have room beside all sequences."""
        if self.tokens <= self.sequences:
            raise ValueError(
                f"a step of {self.tokens} tokens has no room for a chunk beside "
                f"{self.sequences} decoding sequences: raise step_tokens or lower step_sequences"
            )
        if self.logit_rows <= self.sequences:
            raise ValueError(
                f"{self.logit_rows} rows of logits leave none for prompt log-probabilities "
                f"beside {self.sequences} sequences that sample"
            )


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens of a request from `start` on, computed in one step."""

    request_id: int
    start: int
    tokens: TokenIds  # the last may be UNKNOWN: it is what the step in flight samples
    # Per layer group the block numbers by block index; 0: a block that no row here sees.
    tables: tuple[Table, ...]
    logit_rows: int  # how many of its rows need logits, from the last one back
    samples: bool  # its last row gives the next token
    # What may follow `tokens`: a row for each, which gives the token after it if all before it and
    # it itself turn out right. Nothing of a wrong one is kept.
    drafts: TokenIds = ()
    # Of a model with recurrent layers: the slot of the sequence's state, which is read unless
    # `start` is 0, and written; and where it is put beside, at places among these tokens.
    state: Table = field(default_factory=lambda: _NO_STATE)
    snapshots: tuple[Snapshot, ...] = ()
    prompt_tokens: int = 1 << 60  # of the request: what is behind was generated

    @property
    def count(self) -> int:
        """Its tokens."""
        return len(self.tokens)

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + len(self.tokens)

    @property
    def rows(self) -> int:
        """Of the forward: tokens and drafts."""
        return len(self.tokens) + len(self.drafts)

    @property
    def end_of_rows(self) -> int:
        """One past the last position whose KV is written."""
        return self.start + self.rows

    def with_drafts(self, drafts: TokenIds, tables: tuple[Table, ...]) -> Slice:
        """The same, and a row of logits for each draft; `tables` have blocks for them."""
        rows = self.logit_rows + len(drafts)
        return replace(self, drafts=drafts, tables=tables, logit_rows=rows)


@dataclass(slots=True)
class Plan:
    """One step's work: requests that decode first, then chunks, each kind by arrival."""

    decodes: list[Slice] = field(default_factory=list)
    chunks: list[Slice] = field(default_factory=list)

    @property
    def slices(self) -> list[Slice]:
        """All of it, in batch order."""
        return self.decodes + self.chunks

    @property
    def tokens(self) -> int:
        """Rows of the forward."""
        return sum(piece.rows for piece in self.slices)

    @property
    def drafts(self) -> int:
        """Rows of the forward that are guesses."""
        return sum(len(piece.drafts) for piece in self.decodes)

    @property
    def chunk_tokens(self) -> int:
        """Rows that are not decodes."""
        return sum(piece.count for piece in self.chunks)

    def written(self, group: int, block_tokens: int) -> Iterator[int]:
        """The blocks of a layer group that it writes."""
        for piece in self.slices:
            first, last = piece.start // block_tokens, (piece.end_of_rows - 1) // block_tokens
            yield from piece.tables[group][first : last + 1].tolist()

    @property
    def shape(self) -> StepShape:
        """What its cost depends on."""
        slices = self.slices
        return StepShape(
            tokens=self.tokens,
            sequences=len(slices),
            context=max((piece.end_of_rows for piece in slices), default=0),
            logit_rows=sum(piece.logit_rows for piece in slices),
        )

    def drop(self, request_id: int) -> None:
        """Without a request that gives way."""
        self.decodes = [piece for piece in self.decodes if piece.request_id != request_id]
        self.chunks = [piece for piece in self.chunks if piece.request_id != request_id]
