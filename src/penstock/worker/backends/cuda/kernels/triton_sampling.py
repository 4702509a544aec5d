"""The least probability that a nucleus keeps, without sorting: one program for each row.

A value stays when all greater ones together are less than the share. That sum falls as the value
grows, so the value is found by cutting the range of its bits in sixteen, eight times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


def nucleus_floors(probabilities: Tensor, shares: Tensor) -> Tensor:
    """[rows, 1]: what of `probabilities` [rows, width] is not below makes up the share."""
    count, width = probabilities.shape
    floors = probabilities.new_empty(count, 1)
    _floors[(count,)](
        probabilities, shares.contiguous(), floors, width, BLOCK=4096, WAYS=16, num_warps=32
    )
    return floors


@triton.jit  # type: ignore[untyped-decorator]
def _floors(  # type: ignore[no-untyped-def]
    probabilities, shares, floors, width, BLOCK: tl.constexpr, WAYS: tl.constexpr
):
    row = probabilities + tl.program_id(0).to(tl.int64) * width
    sums = tl.zeros([BLOCK], tl.float32)
    most = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        p = tl.load(row + at, mask=at < width, other=0.0)
        sums += p
        most = tl.maximum(most, p)
    wanted = tl.load(shares + tl.program_id(0)) * tl.sum(sums, 0)
    # Of numbers that are not negative, the order of their bits is their own.
    low = -1
    high = tl.max(most, 0).to(tl.int32, bitcast=True)
    way = tl.arange(0, WAYS) + 1
    for _ in range(8):
        span = high - low
        cut = low + span // WAYS * way + span % WAYS * way // WAYS
        above = tl.zeros([WAYS, BLOCK], tl.float32)
        for first in range(0, width, BLOCK):
            at = first + tl.arange(0, BLOCK)
            p = tl.load(row + at, mask=at < width, other=0.0)
            bits = p.to(tl.int32, bitcast=True)
            above += tl.where(bits[None, :] > cut[:, None], p[None, :], 0.0)
        enough = tl.sum(above, 1) < wanted
        high = tl.minimum(high, tl.min(tl.where(enough, cut, high), 0))
        low = tl.maximum(low, tl.max(tl.where(enough, low, cut), 0))
        low = tl.minimum(low, high - 1)
    tl.store(floors + tl.program_id(0), high.to(tl.float32, bitcast=True))
