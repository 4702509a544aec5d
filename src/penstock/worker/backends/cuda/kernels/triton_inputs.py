"""The numbers of a step in the types that models want, with tokens that only the device knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


def unpack(
    ids: Tensor, positions: Tensor, wanted: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As int64; an id below zero is `-1 - place` of a token in `tokens`."""
    rows, count = ids.shape[0], wanted.shape[0]
    out = tokens.new_empty(2 * rows + count)
    answer = out[:rows], out[rows : 2 * rows], out[2 * rows :]
    _unpack[(triton.cdiv(max(rows, count), 256),)](
        ids, positions, wanted, tokens, *answer, rows, count, num_warps=4
    )
    return answer


@triton.jit(do_not_specialize=["rows", "count"], do_not_specialize_on_alignment=[4, 5, 6])
def _unpack(ids, positions, wanted, tokens, to_ids, to_positions, to_wanted, rows, count):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    there = at < rows
    token = tl.load(ids + at, mask=there, other=0)
    newest = tl.load(tokens + (-1 - token), mask=there & (token < 0), other=0)
    tl.store(to_ids + at, tl.where(token < 0, newest, token.to(tl.int64)), mask=there)
    position = tl.load(positions + at, mask=there, other=0)
    tl.store(to_positions + at, position.to(tl.int64), mask=there)
    row = tl.load(wanted + at, mask=at < count, other=0)
    tl.store(to_wanted + at, row.to(tl.int64), mask=at < count)
