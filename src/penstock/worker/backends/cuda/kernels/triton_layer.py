"""What stands between the matrix products of a decoder layer, in Triton, one pass each.

Sums and products are carried in float32 and rounded once. A single row is multiplied by our own
product, which reads each weight once at the speed of memory, takes its input through the norm
before it and puts the activation or the residual after it.

Launched with programmatic dependence where the device has it: a kernel is on its place, with its
first weights on the way, while the one before it ends. Whatever an earlier kernel wrote is read
only after `gdc_wait`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.worker.backends.cuda.kernels.triton_kv import rounded, scales_of

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.worker.kv.layout.layer_blocks import LayerBlocks


def dependent_launches(device: torch.device) -> bool:
    """Whether a kernel may start before the one that it depends on has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float, early: bool = False) -> Tensor:
    """`rows` [..., width] over the root of their mean squares, times the weight."""
    width = rows.shape[-1]
    flat = rows.reshape(-1, width)
    out = torch.empty_like(flat)
    padded = triton.next_power_of_2(width)
    # Short rows, such as heads, go several to a program.
    together = max(1, 1024 // padded)
    _rms_norm[(triton.cdiv(flat.shape[0], together),)](
        flat,
        weight,
        out,
        flat.shape[0],
        flat.stride(0),
        epsilon,
        WIDTH=width,
        PADDED=padded,
        TOGETHER=together,
        EARLY=early,
        num_warps=_warps(padded * together // 512),
        launch_pdl=early,
    )
    return out.view(rows.shape)


def silu_mul(packed: Tensor, early: bool = False) -> Tensor:
    """silu of the first half of each row times the second: [T, 2 inner] -> [T, inner]."""
    count, inner = packed.shape[0], packed.shape[1] // 2
    out = packed.new_empty(count, inner)
    block = 1024
    _silu_mul[(count, triton.cdiv(inner, block))](
        packed, out, inner, BLOCK=block, EARLY=early, num_warps=4, launch_pdl=early
    )
    return out


def rotate_and_store(
    packed: Tensor,  # [T, (heads + 2 kv_heads) x dim]: queries, keys, values
    angles: tuple[Tensor, Tensor],  # cos and sin, [T, dim]
    norms: tuple[Tensor, Tensor] | None,  # of queries and keys
    epsilon: float,
    blocks: LayerBlocks,
    slots: Tensor,
    early: bool = False,
) -> Tensor:
    """Queries, normed and rotated, [T, heads, dim]; keys likewise and values go to the arena."""
    count = packed.shape[0]
    kv_heads, dim = blocks.kv_heads, blocks.dims[0]
    heads = packed.shape[1] // dim - 2 * kv_heads
    queries = packed.new_empty(count, heads, dim)
    cos, sin = angles
    together = heads_together(heads, kv_heads)
    _rotate_and_store[(count, (heads + 2 * kv_heads) // together)](
        packed,
        cos,
        sin,
        norms[0] if norms else packed,
        norms[1] if norms else packed,
        queries,
        blocks.keys,
        blocks.values,
        *scales_of(blocks),
        slots,
        packed.stride(0),
        cos.stride(0),
        blocks.keys.stride(0),
        epsilon,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=triton.next_power_of_2(dim // 2),
        TOGETHER=together,
        BLOCK=blocks.block_tokens,
        NORMS=norms is not None,
        SCALED=blocks.scales is not None,
        EARLY=early,
        num_warps=_warps(together * dim // 256),
        launch_pdl=early,
    )
    return queries


def _warps(wanted: int) -> int:
    """A power of two from 1 to 8."""
    return 1 << max(0, min(8, wanted).bit_length() - 1)


def heads_together(heads: int, kv_heads: int) -> int:
    """Heads in one program: a power of two that divides both kinds."""
    together = 1
    while together < 8 and heads % (2 * together) == 0 and kv_heads % (2 * together) == 0:
        together *= 2
    return together


def one_row(
    row: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    early: bool = False,
    choice: tuple[int, int, int] | None = None,
) -> Tensor:
    """One row [1, in] times `weight` [out, in]; `gated`: silu of the first half times the second.

    `residual` [1, out] is added to and returned. With `norm` the row is normed on the way in.
    """
    rows_out, width = weight.shape
    if gated:
        rows_out //= 2
    out = residual if residual is not None else row.new_empty(1, rows_out)
    block_n, block_k, warps = choice or one_row_choice(rows_out, width)
    _one_row[(triton.cdiv(rows_out, block_n),)](
        row,
        weight,
        bias if bias is not None else row,
        norm if norm is not None else row,
        out,
        rows_out,
        epsilon,
        K=width,
        KP=triton.next_power_of_2(width),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BIAS=bias is not None,
        NORM=norm is not None,
        GATED=gated,
        RESIDUAL=residual is not None,
        EARLY=early,
        num_warps=warps,
        launch_pdl=early,
    )
    return out


def one_row_choice(rows_out: int, width: int) -> tuple[int, int, int]:
    """Weights in one program: rows, columns at a time, warps. Measured on an H200."""
    if rows_out * width >= _LARGE:
        return 2, 4096, 8
    return 8, min(1024, triton.next_power_of_2(width)), 4


_LARGE = 32 << 20  # weights of a product; below, more programs than places are needed


def _kernel(function: Any, *varying: str) -> Any:
    return triton.jit(function, do_not_specialize=list(varying))


def _rms_norm_rows(  # type: ignore[no-untyped-def]
    rows,
    weight,
    out,
    count,
    stride,
    epsilon,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TOGETHER: tl.constexpr,
    EARLY: tl.constexpr,
):
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = (tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)).to(tl.int64)
    there = (row < count)[:, None] & inside[None, :]
    x = tl.load(rows + row[:, None] * stride + column[None, :], mask=there, other=0.0)
    x = x.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + epsilon)
    y = x * factor[:, None] * w[None, :]
    tl.store(out + row[:, None] * WIDTH + column[None, :], y.to(out.dtype.element_ty), mask=there)


_rms_norm = _kernel(_rms_norm_rows, "count")


def _silu_mul_rows(  # type: ignore[no-untyped-def]
    packed, out, inner, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(packed + row * 2 * inner + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(packed + row * 2 * inner + inner + column, mask=inside, other=0.0)
    y = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
    tl.store(out + row * inner + column, y.to(out.dtype.element_ty), mask=inside)


_silu_mul = _kernel(_silu_mul_rows)


@triton.jit
def _store_codes(x, y, to, half_to, scale_to, inside):  # type: ignore[no-untyped-def]
    x, y, scales = rounded(tl.where(inside, x, 0.0), tl.where(inside, y, 0.0))
    tl.store(to, x, mask=inside)
    tl.store(half_to, y, mask=inside)
    tl.store(scale_to, scales)


def _rotate_and_store_rows(  # type: ignore[no-untyped-def]
    packed,
    cos,
    sin,
    query_norm,
    key_norm,
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    packed_stride,
    angle_stride,
    block_stride,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
    SCALED: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TOGETHER
    member = tl.arange(0, TOGETHER)
    half = tl.arange(0, HALF)
    inside = (half < DIM // 2)[None, :]
    at = packed + row * packed_stride + (head + member)[:, None] * DIM + half[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(at + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORMS:
            factor = 1.0 / tl.sqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / DIM + epsilon)
            norm = query_norm
            if head >= HEADS:
                norm = key_norm
            x_weight = tl.load(norm + half, mask=half < DIM // 2, other=0.0).to(tl.float32)
            y_weight = tl.load(norm + DIM // 2 + half, mask=half < DIM // 2, other=0.0)
            x = x * factor[:, None] * x_weight[None, :]
            y = y * factor[:, None] * y_weight.to(tl.float32)[None, :]
        c = tl.load(cos + row * angle_stride + half, mask=half < DIM // 2, other=0.0)
        s = tl.load(sin + row * angle_stride + half, mask=half < DIM // 2, other=0.0)
        c = c.to(tl.float32)[None, :]
        s = s.to(tl.float32)[None, :]
        turned = x * c - y * s
        y = y * c + x * s
        x = turned
    if head < HEADS:
        to = queries + (row * HEADS + head + member)[:, None] * DIM + half[None, :]
        tl.store(to, x.to(queries.dtype.element_ty), mask=inside)
        tl.store(to + DIM // 2, y.to(queries.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + row)
        block = (slot // BLOCK).to(tl.int64) * block_stride + (slot % BLOCK) * KV_HEADS * DIM
        # Scales have two bytes where codes have one.
        scale_at = (slot // BLOCK).to(tl.int64) * (block_stride // 2) + (slot % BLOCK) * KV_HEADS
        if head < HEADS + KV_HEADS:
            vectors = head - HEADS + member
            kept = keys + block + vectors[:, None] * DIM + half[None, :]
            if SCALED:
                scale_to = key_scales + scale_at + vectors
                _store_codes(x, y, kept, kept + DIM // 2, scale_to, inside)
            else:
                tl.store(kept, x.to(keys.dtype.element_ty), mask=inside)
                tl.store(kept + DIM // 2, y.to(keys.dtype.element_ty), mask=inside)
        else:
            vectors = head - HEADS - KV_HEADS + member
            kept = values + block + vectors[:, None] * DIM + half[None, :]
            if SCALED:
                scale_to = value_scales + scale_at + vectors
                _store_codes(x, y, kept, kept + DIM // 2, scale_to, inside)
            else:
                tl.store(kept, x.to(values.dtype.element_ty), mask=inside)
                tl.store(kept + DIM // 2, y.to(values.dtype.element_ty), mask=inside)


_rotate_and_store = _kernel(_rotate_and_store_rows)


def _one_row_product(  # type: ignore[no-untyped-def]
    row,
    weight,
    bias,
    norm,
    out,
    rows_out,
    epsilon,
    K: tl.constexpr,
    KP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    there = (n < rows_out)[:, None]
    at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    up_at = at
    if GATED:
        up_at = at + rows_out.to(tl.int64) * K
    # Weights do not depend on the kernel before: their first columns are asked for at once.
    w = tl.load(at, mask=there & (k < K)[None, :], other=0.0)
    u = w
    if GATED:
        u = tl.load(up_at, mask=there & (k < K)[None, :], other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    factor = 1.0
    if NORM:
        whole = tl.arange(0, KP)
        x = tl.load(row + whole, mask=whole < K, other=0.0).to(tl.float32)
        factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / K + epsilon)
    acc = tl.zeros([BLOCK_N], tl.float32)
    up_acc = tl.zeros([BLOCK_N], tl.float32)
    for first in tl.static_range(0, K, BLOCK_K):
        if first > 0:
            w = tl.load(at + first, mask=there & (first + k < K)[None, :], other=0.0)
            if GATED:
                u = tl.load(up_at + first, mask=there & (first + k < K)[None, :], other=0.0)
        x = tl.load(row + first + k, mask=first + k < K, other=0.0).to(tl.float32)
        if NORM:
            g = tl.load(norm + first + k, mask=first + k < K, other=0.0).to(tl.float32)
            x = (x * factor * g).to(row.dtype.element_ty).to(tl.float32)
        acc += tl.sum(w.to(tl.float32) * x[None, :], 1)
        if GATED:
            up_acc += tl.sum(u.to(tl.float32) * x[None, :], 1)
    if BIAS:
        acc += tl.load(bias + n, mask=n < rows_out, other=0.0).to(tl.float32)
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up_acc
    if RESIDUAL:
        acc += tl.load(out + n, mask=n < rows_out, other=0.0).to(tl.float32)
    tl.store(out + n, acc.to(out.dtype.element_ty), mask=n < rows_out)


_one_row = _kernel(_one_row_product)
