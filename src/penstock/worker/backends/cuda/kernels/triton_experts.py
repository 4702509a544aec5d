"""A few rows through their experts: only the chosen weights are read, each by two launches.

Grouped products sort rows by expert and pay for every expert there is; for a handful of rows that
costs more than the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

MOST_ROWS = 8


def few_rows_experts(
    rows: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, shares: Tensor
) -> Tensor:
    """`rows` [T, hidden] through the experts `chosen` [T, k], weighed by `shares` [T, k].

    `gate_up` [experts, 2 inner, hidden] and `down` [experts, hidden, inner], with silu between.
    """
    count, hidden = rows.shape
    inner, each = down.shape[2], chosen.shape[1]
    between = rows.new_empty(count * each, inner)
    out = rows.new_empty(count, hidden)
    block_n = 8
    _up[(count * each, triton.cdiv(inner, block_n))](
        rows,
        gate_up,
        chosen,
        between,
        EACH=each,
        INNER=inner,
        HIDDEN=hidden,
        N=block_n,
        K=min(2048, triton.next_power_of_2(hidden)),
        num_warps=8,
    )
    _down[(count, triton.cdiv(hidden, block_n))](
        between,
        down,
        chosen,
        shares,
        out,
        EACH=each,
        INNER=inner,
        HIDDEN=hidden,
        N=block_n,
        K=min(1024, triton.next_power_of_2(inner)),
        num_warps=8,
    )
    return out


def choose_experts(logits: Tensor, each: int, summed: bool) -> tuple[Tensor, Tensor]:
    """The `each` best of `logits` [T, experts] and their softmax, over their sum if `summed`."""
    count, experts = logits.shape
    shares = logits.new_empty(count, each)
    chosen = logits.new_empty(count, each, dtype=torch.int64)
    _choose[(count,)](
        logits,
        shares,
        chosen,
        EXPERTS=experts,
        PADDED=triton.next_power_of_2(experts),
        EACH=each,
        SUMMED=summed,
        num_warps=1,
    )
    return shares, chosen


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    logits,
    shares,
    chosen,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    EACH: tl.constexpr,
    SUMMED: tl.constexpr,
):
    row = tl.program_id(0)
    expert = tl.arange(0, PADDED)
    x = tl.load(logits + row * EXPERTS + expert, mask=expert < EXPERTS, other=float("-inf"))
    x = x.to(tl.float32)
    p = tl.exp(x - tl.max(x, 0))
    p = p / tl.sum(p, 0)
    left = p
    kept = 0.0
    for place in tl.static_range(0, EACH):
        best = tl.argmax(left, 0)
        kept += tl.max(left, 0)
        tl.store(chosen + row * EACH + place, best.to(tl.int64))
        tl.store(shares + row * EACH + place, tl.max(left, 0).to(shares.dtype.element_ty))
        left = tl.where(expert == best, -1.0, left)
    if SUMMED:
        for place in tl.static_range(0, EACH):
            best = tl.load(chosen + row * EACH + place)
            share = tl.sum(tl.where(expert == best, p, 0.0), 0) / kept
            tl.store(shares + row * EACH + place, share.to(shares.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _up(  # type: ignore[no-untyped-def]
    rows,
    gate_up,
    chosen,
    between,
    EACH: tl.constexpr,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    pair = tl.program_id(0)
    n = tl.program_id(1) * N + tl.arange(0, N)
    expert = tl.load(chosen + pair).to(tl.int64)
    at = gate_up + expert * 2 * INNER * HIDDEN + n[:, None] * HIDDEN
    there = (n < INNER)[:, None]
    gate = tl.zeros([N], tl.float32)
    up = tl.zeros([N], tl.float32)
    for first in tl.static_range(0, HIDDEN, K):
        k = first + tl.arange(0, K)
        mask = there & (k < HIDDEN)[None, :]
        g = tl.load(at + k[None, :], mask=mask, other=0.0).to(tl.float32)
        u = tl.load(at + INNER * HIDDEN + k[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(rows + (pair // EACH) * HIDDEN + k, mask=k < HIDDEN, other=0.0).to(tl.float32)
        gate += tl.sum(g * x[None, :], 1)
        up += tl.sum(u * x[None, :], 1)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(between + pair * INNER + n, y.to(between.dtype.element_ty), mask=n < INNER)


@triton.jit  # type: ignore[untyped-decorator]
def _down(  # type: ignore[no-untyped-def]
    between,
    down,
    chosen,
    shares,
    out,
    EACH: tl.constexpr,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    row = tl.program_id(0)
    n = tl.program_id(1) * N + tl.arange(0, N)
    there = (n < HIDDEN)[:, None]
    acc = tl.zeros([N], tl.float32)
    for index in tl.static_range(0, EACH):
        pair = row * EACH + index
        expert = tl.load(chosen + pair).to(tl.int64)
        share = tl.load(shares + pair).to(tl.float32)
        part = tl.zeros([N], tl.float32)
        for first in tl.static_range(0, INNER, K):
            k = first + tl.arange(0, K)
            at = down + expert * INNER * HIDDEN + n[:, None] * INNER + k[None, :]
            w = tl.load(at, mask=there & (k < INNER)[None, :], other=0.0).to(tl.float32)
            x = tl.load(between + pair * INNER + k, mask=k < INNER, other=0.0).to(tl.float32)
            part += tl.sum(w * x[None, :], 1)
        acc += share * part
    tl.store(out + row * HIDDEN + n, acc.to(out.dtype.element_ty), mask=n < HIDDEN)
