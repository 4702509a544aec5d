"""A plan as tensors: packed rows, their positions, where their KV goes and what each may see.

    rows   [ d0 | d1 | d2 |  chunk of s3 . . . |  chunk of s4 . ]     decodes first, one row each

Built on the host with numpy and moved to the device in few copies. Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.worker.scheduling.plan import Plan, Slice


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence's chunk and the context they see."""

    row: int  # first row in the batch
    count: int
    context: int  # tokens of the sequence once these rows are written
    table: Tensor  # [blocks] long: where the context lies


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs on the device."""

    input_ids: Tensor  # [1, T] long
    position_ids: Tensor  # [1, T] long
    write_blocks: Tensor  # [T] long: the block of each row's KV
    write_slots: Tensor  # [T] long: its place in the block
    logit_rows: Tensor  # [R] long: rows whose logits are wanted
    decodes: int  # the first rows, one sequence each
    decode_tables: Tensor  # [decodes, widest] int32, padded with block 0
    decode_contexts: Tensor  # [decodes] int32
    chunks: tuple[Span, ...]


def build_batch(plan: Plan, block_tokens: int, device: torch.device) -> Batch:
    """Lay a plan out in rows."""
    rows = plan.tokens
    ids = np.empty(rows, dtype=np.int64)
    positions = np.empty(rows, dtype=np.int64)
    blocks = np.empty(rows, dtype=np.int64)
    wanted: list[int] = []
    spans: list[Span] = []
    row = 0
    for piece in plan.slices:
        sequence = piece.sequence
        end = row + piece.count
        ids[row:end] = sequence.tokens[piece.start : piece.end]
        positions[row:end] = np.arange(piece.start, piece.end)
        table = np.asarray(sequence.blocks, dtype=np.int64)
        blocks[row:end] = table[positions[row:end] // block_tokens]
        wanted.extend(range(end - piece.logit_rows, end))
        if row >= len(plan.decodes):
            held = -(-piece.end // block_tokens)
            spans.append(Span(row, piece.count, piece.end, _move(table[:held], device)))
        row = end
    tables, contexts = _decode_tables(plan.decodes, block_tokens)
    return Batch(
        input_ids=_move(ids, device)[None],
        position_ids=_move(positions, device)[None],
        write_blocks=_move(blocks, device),
        write_slots=_move(positions % block_tokens, device),
        logit_rows=_move(np.asarray(wanted, dtype=np.int64), device),
        decodes=len(plan.decodes),
        decode_tables=_move(tables, device),
        decode_contexts=_move(contexts, device),
        chunks=tuple(spans),
    )


def _decode_tables(
    decodes: list[Slice], block_tokens: int
) -> tuple[
    np.ndarray[tuple[int, int], np.dtype[np.int32]], np.ndarray[tuple[int], np.dtype[np.int32]]
]:
    contexts = np.asarray([piece.end for piece in decodes], dtype=np.int32)
    widest = int(-(-contexts.max() // block_tokens)) if decodes else 0
    tables = np.zeros((len(decodes), widest), dtype=np.int32)
    for index, piece in enumerate(decodes):
        held = -(-piece.end // block_tokens)
        tables[index, :held] = piece.sequence.blocks[:held]
    return tables, contexts


def _move(array: NDArray[np.int32] | NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
