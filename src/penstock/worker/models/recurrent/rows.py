"""A plan's rows as recurrent layers take them: whose state each continues, and where it is put.

    rows   [ d0 | d1 | d2 |  chunk of s3 . . . |  chunk of s4 . ]
    slots    4    9    2     7 behind its last row, and 5 behind row 16: a snapshot

The state of a sequence that begins is zeros, and its slot is filled with them first. What lies
behind a decode's row and is to be kept is copied when the step has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.worker.core.plan import Plan, Slice


@dataclass(frozen=True, slots=True)
class StateSpan:
    """The rows of one sequence's chunk."""

    row: int  # first row in the batch
    slot: int
    # Behind so many of its rows the state goes into a slot: in order, the last behind all of them
    # into the sequence's own.
    stops: tuple[tuple[int, int], ...]
    prompt_rows: int  # the others were generated

    @property
    def count(self) -> int:
        """Its rows."""
        return self.stops[-1][0]


@dataclass(frozen=True, slots=True)
class StateRows:
    """A step's rows."""

    decodes: Tensor  # [B] long: the slot of each of the first rows, which are single
    decode_slots: NDArray[np.int64]  # the same
    chunks: tuple[StateSpan, ...]
    fresh: tuple[int, ...]  # slots of sequences that begin
    copies: tuple[tuple[int, int], ...]  # of slots, once the step has ended


def state_rows(plan: Plan, device: torch.device) -> StateRows | None:
    """The rows of a plan; None if the model has no state."""
    slices = plan.slices
    if not slices or not int(slices[0].state[0]):
        return None
    chunks, row = [], sum(piece.rows for piece in plan.decodes)
    for piece in plan.chunks:
        chunks.append(_span(piece, row))
        row += piece.rows
    slots = np.fromiter((int(piece.state[0]) for piece in plan.decodes), np.int64)
    return StateRows(
        decodes=torch.from_numpy(slots).to(device),
        decode_slots=slots,
        chunks=tuple(chunks),
        fresh=tuple(int(piece.state[0]) for piece in slices if piece.start == 0),
        copies=tuple(
            (int(piece.state[0]), int(snapshot.place[0]))
            for piece in plan.decodes
            for snapshot in piece.snapshots
        ),
    )


def _span(piece: Slice, row: int) -> StateSpan:
    own = int(piece.state[0])
    stops = [(kept.tokens - piece.start, int(kept.place[0])) for kept in piece.snapshots]
    prompt_rows = min(max(0, piece.prompt_tokens - piece.start), piece.count)
    return StateSpan(row, own, (*stops, (piece.count, own)), prompt_rows)
