"""KV into the arena, in Triton: as it is computed, or as codes of 8 bits with scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.worker.kv.layout.layer_blocks import LayerBlocks


def padded(dim: int) -> int:
    """What a tile has for a dimension: a power of two that the matrix units take."""
    return max(16, 1 << (dim - 1).bit_length())


def kernel(function: Any, *varying: str) -> Any:
    """Compiled once per shape of model: numbers that change from step to step make no variants."""
    return triton.jit(function, do_not_specialize=list(varying))


def scales_of(blocks: LayerBlocks) -> tuple[Tensor, Tensor]:
    """What a kernel is given for the scales of keys and of values; anything where there is none."""
    return blocks.scales or (blocks.keys, blocks.values)


def store(new_keys: Tensor, new_values: Tensor, blocks: LayerBlocks, slots: Tensor) -> None:
    """Write rows' KV, [T, kv_heads, dim], to their places."""
    kv_heads, (key_dim, value_dim) = blocks.kv_heads, blocks.dims
    _store[(new_keys.shape[0], kv_heads)](
        new_keys,
        new_values,
        blocks.keys,
        blocks.values,
        *scales_of(blocks),
        slots,
        *new_keys.stride()[:2],
        *new_values.stride()[:2],
        blocks.keys.stride(0),
        BLOCK=blocks.block_tokens,
        KV_HEADS=kv_heads,
        DK=key_dim,
        DV=value_dim,
        DKP=padded(key_dim),
        DVP=padded(value_dim),
        SCALED=blocks.scales is not None,
        num_warps=1,
    )


@triton.jit
def rounded(x, y):  # type: ignore[no-untyped-def]
    """Two halves of vectors, [vectors, numbers], as codes and their scales: the same as in
    `kv/layout/rounding`."""
    peak = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
    # Zero, or no number where one of them is none or infinite, which the largest does not tell.
    spoilt = tl.sum(x * 0.0, 1) + tl.sum(y * 0.0, 1)
    scales = (tl.maximum(peak * (1.0 / 127.0), 1e-30) + spoilt).to(tl.bfloat16)
    inverse = 1.0 / scales.to(tl.float32)
    return _codes(x * inverse[:, None]), _codes(y * inverse[:, None]), scales


@triton.jit
def _codes(steps):  # type: ignore[no-untyped-def]
    # What a float32 of this size has no digits for is rounded away, halves to even.
    whole = (tl.where(steps == steps, steps, 0.0) + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(whole, -127.0), 127.0).to(tl.int8)


@triton.jit  # type: ignore[untyped-decorator]
def _store_vector(vector, to, scale_to, inside, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    if SCALED:
        x = tl.where(inside, vector.to(tl.float32), 0.0)[None, :]
        codes, _, scales = rounded(x, x)
        tl.store(to[None, :], codes, mask=inside[None, :])
        tl.store(scale_to + tl.arange(0, 1), scales)
    else:
        tl.store(to, vector, mask=inside)


def _store_rows(  # type: ignore[no-untyped-def]
    new_keys,
    new_values,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    block_stride,
    BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    SCALED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row)
    block = (slot // BLOCK).to(tl.int64) * block_stride
    place = slot % BLOCK
    vector = place * KV_HEADS + head
    scale_at = block // 2 + vector  # of two bytes each, where codes have one
    dk = tl.arange(0, DKP)
    dv = tl.arange(0, DVP)
    key = tl.load(new_keys + row * key_row_stride + head * key_head_stride + dk, mask=dk < DK)
    _store_vector(key, keys + block + vector * DK + dk, key_scales + scale_at, dk < DK, SCALED)
    value = tl.load(
        new_values + row * value_row_stride + head * value_head_stride + dv, mask=dv < DV
    )
    to = values + block + vector * DV + dv
    _store_vector(value, to, value_scales + scale_at, dv < DV, SCALED)


_store = kernel(_store_rows)
