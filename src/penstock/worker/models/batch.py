"""A plan as tensors: packed rows, their positions, where their KV goes and what each may see.

    rows   [ d0 | d1 | d2 |  chunk of s3 . . . |  chunk of s4 . ]     decodes first, one row each

Drafts of a decode are further such rows behind it: each sees what lies before it, the KV of the
drafts before it included, which is written first.

Built on the host with numpy and moved to the device in few copies. Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from penstock.worker.models.recurrent.rows import StateRows, state_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from penstock.worker.core.plan import Plan, Slice


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence's chunk and the context they see."""

    row: int  # first row in the batch
    count: int
    context: int  # tokens of the sequence once these rows are written
    table: Tensor  # [blocks] long: where the context lies


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """Where one layer group's KV of a step goes and lies."""

    write_blocks: Tensor  # [T] long: the block of each row's KV
    write_slots: Tensor  # [T] long: its place in the block
    decodes: int  # the first rows, each with a table of its own
    decode_tables: Tensor  # [decodes, widest] int32, padded with block 0
    decode_contexts: Tensor  # [decodes] int32
    chunks: tuple[Span, ...]
    # [sequences + 1] int32: the first row of each that decodes; None: all have one row.
    decode_firsts: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MediaRows:
    """Rows that stand in the place of placeholders' embeddings."""

    places: Tensor  # [n] long: of the batch
    rows: Tensor  # [levels, n, hidden]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs on the device."""

    input_ids: Tensor  # [1, T] long
    position_ids: Tensor  # [1, T] long, or [3, 1, T]
    logit_rows: Tensor  # [R] long: rows whose logits are wanted
    groups: tuple[GroupBatch, ...]
    states: StateRows | None = None  # of a model with recurrent layers
    media: MediaRows | None = None  # of a step with images


def build_batch(plan: Plan, block_tokens: int, device: torch.device) -> Batch:
    """Lay a plan out in rows."""
    slices, decodes = plan.slices, plan.decodes
    rows = sum(piece.rows for piece in decodes)
    ids = [_numbers((token for d in decodes for token in (d.tokens[0], *d.drafts)), rows)]
    starts = _numbers((at for d in decodes for at in range(d.start, d.end_of_rows)), rows)
    at = [starts]
    for piece in plan.chunks:
        ids.append(np.asarray(piece.tokens, np.int64))
        at.append(np.arange(piece.start, piece.end))
    positions = np.concatenate(at)
    wanted: list[int] = []
    row = 0
    for piece in slices:
        row += piece.rows
        wanted.extend(range(row - piece.logit_rows, row))
    contexts = _move((starts + 1).astype(np.int32), device)
    slots = _move(positions % block_tokens, device)
    firsts = _firsts(plan, device) if plan.drafts else None
    return Batch(
        input_ids=_move(np.concatenate(ids), device)[None],
        position_ids=_move(positions, device)[None],
        logit_rows=_move(np.asarray(wanted, dtype=np.int64), device),
        groups=tuple(
            GroupBatch(
                write_blocks=_move(_written(plan, group, block_tokens), device),
                write_slots=slots,
                decodes=rows,
                decode_tables=_move(_decode_tables(plan.decodes, group, block_tokens), device),
                decode_contexts=contexts,
                chunks=_spans(plan, group, block_tokens, device),
                decode_firsts=firsts,
            )
            for group in range(len(slices[0].tables))
        ),
        states=state_rows(plan, device),
    )


def _firsts(plan: Plan, device: torch.device) -> Tensor:
    ends = np.cumsum([piece.rows for piece in plan.decodes], dtype=np.int32)
    return _move(np.concatenate((np.zeros(1, np.int32), ends)), device)


def _written(plan: Plan, group: int, block_tokens: int) -> NDArray[np.int64]:
    """The block of each row's KV."""
    own = (
        piece.tables[group][place // block_tokens]
        for piece in plan.decodes
        for place in range(piece.start, piece.end_of_rows)
    )
    blocks = [_numbers(own, sum(piece.rows for piece in plan.decodes))]
    for piece in plan.chunks:
        rows = np.arange(piece.start, piece.end) // block_tokens
        blocks.append(piece.tables[group][rows].astype(np.int64))
    return np.concatenate(blocks)


def _decode_tables(decodes: list[Slice], group: int, block_tokens: int) -> NDArray[np.int32]:
    held = [(piece.end_of_rows - 1) // block_tokens + 1 for piece in decodes]
    rows = sum(piece.rows for piece in decodes)
    tables = np.zeros((rows, max(held, default=0)), dtype=np.int32)
    row = 0
    for piece, blocks in zip(decodes, held, strict=True):
        tables[row : row + piece.rows, :blocks] = piece.tables[group][:blocks]
        row += piece.rows
    return tables


def _spans(plan: Plan, group: int, block_tokens: int, device: torch.device) -> tuple[Span, ...]:
    spans, row = [], sum(piece.rows for piece in plan.decodes)
    for piece in plan.chunks:
        table = piece.tables[group][: -(-piece.end // block_tokens)].astype(np.int64)
        spans.append(Span(row, piece.count, piece.end, _move(table, device)))
        row += piece.count
    return tuple(spans)


def _numbers(values: Iterable[int], count: int) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64, count)


def _move(array: NDArray[np.int32] | NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
