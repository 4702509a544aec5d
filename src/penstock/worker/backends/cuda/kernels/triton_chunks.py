"""Attention of prompts' chunks over the arena, in Triton: tiles of rows, each over all they see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from penstock.worker.backends.cuda.kernels.paging import Paging, Tiling, chunk_tiling
from penstock.worker.backends.cuda.kernels.triton_attention import precision, scores, weighed
from penstock.worker.backends.cuda.kernels.triton_kv import kernel, padded, scales_of

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.worker.kv.layout.layer_blocks import LayerBlocks
    from penstock.worker.models.kernels.interface import Masking


def chunks(
    rows: Tensor,
    blocks: LayerBlocks,
    paging: Paging,
    masking: Masking,
    out: Tensor,
    tiling: Tiling | None = None,
) -> None:
    """Every other row, over the past of its sequence and what of its chunk is before it."""
    heads, kv_heads, (key_dim, value_dim) = rows.shape[1], blocks.kv_heads, blocks.dims
    tiling = tiling or chunk_tiling(max(key_dim, value_dim), rows.dtype)
    _chunks[(paging.tiles.shape[1], heads)](
        rows,
        blocks.keys,
        blocks.values,
        *scales_of(blocks),
        out,
        masking.sinks if masking.sinks is not None else rows,
        paging.tables,
        paging.starts,
        paging.contexts,
        paging.tiles,
        paging.tiles.stride(0),
        masking.scale,
        *rows.stride()[:2],
        out.stride(0),
        blocks.keys.stride(0),
        BLOCK=blocks.block_tokens,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        DK=key_dim,
        DV=value_dim,
        DKP=padded(key_dim),
        DVP=padded(value_dim),
        M=tiling.rows,
        N=tiling.columns,
        WINDOW=masking.window or 0,
        SOFTCAP=masking.softcap or 0.0,
        SINKS=masking.sinks is not None,
        PRECISION=precision(rows.dtype),
        SCALED=blocks.scales is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _over(  # type: ignore[no-untyped-def]
    acc,
    top,
    total,
    q,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    scale,
    block_stride,
    kv_head,
    position,
    begin,
    end,
    low,
    context,
    BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Attention of a tile of rows over tokens `begin .. end`, whole columns of N.

    What is before `low` may have left the window and be no one's any more: it is never read.
    """
    dk = tl.arange(0, DKP)
    dv = tl.arange(0, DVP)
    for first in range(begin, end, N):
        token = first + tl.arange(0, N)
        there = (token >= low) & (token < context)
        if MASKED:
            block = tl.load(table + token // BLOCK, mask=there, other=0).to(tl.int64)
        else:
            block = tl.load(table + token // BLOCK).to(tl.int64)
        base = block * block_stride
        place = (token % BLOCK) * KV_HEADS + kv_head
        key_at = keys + (base + place * DK)[:, None] + dk[None, :]
        value_at = values + (base + place * DV)[:, None] + dv[None, :]
        if MASKED:
            k = tl.load(key_at, mask=there[:, None] & (dk[None, :] < DK), other=0.0)
        elif DKP == DK:
            k = tl.load(key_at)
        else:
            k = tl.load(key_at, mask=dk[None, :] < DK, other=0.0)
        k_scales = place
        v_scales = place
        if SCALED:
            scale_at = base // 2 + place
            # Behind the context nothing has been written: there may be what is no number.
            k_scales = tl.load(key_scales + scale_at, mask=there, other=0.0)
            v_scales = tl.load(value_scales + scale_at, mask=there, other=0.0)
        s = scores(q, k, k_scales, scale, SOFTCAP, PRECISION, SCALED)
        if MASKED:
            seen = token[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (token[None, :] > position[:, None] - WINDOW)
            s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        anchor = higher
        if MASKED:
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - anchor[:, None])
        shrink = tl.exp2(top - anchor)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        if MASKED:
            v = tl.load(value_at, mask=there[:, None] & (dv[None, :] < DV), other=0.0)
        elif DVP == DV:
            v = tl.load(value_at)
        else:
            v = tl.load(value_at, mask=dv[None, :] < DV, other=0.0)
        acc = weighed(acc, p, v, v_scales, q, PRECISION, SCALED)
        top = higher
    return acc, top, total


def _chunk_tiles(  # type: ignore[no-untyped-def]
    rows,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    sinks,
    tables,
    starts,
    contexts,
    tiles,
    tile_stride,
    scale,
    row_stride,
    head_stride,
    out_stride,
    block_stride,
    BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // GROUP
    sequence = tl.load(tiles + tile)
    first = tl.load(tiles + tile_stride + tile)
    chunk_row = tl.load(tiles + 2 * tile_stride + tile)
    count = tl.load(tiles + 3 * tile_stride + tile)
    context = tl.load(contexts + sequence)
    table = tables + tl.load(starts + sequence)
    past = context - count
    within = first + tl.arange(0, M)
    position = past + within
    dk = tl.arange(0, DKP)
    dv = tl.arange(0, DVP)
    at = (chunk_row + within).to(tl.int64)
    q = tl.load(
        rows + at[:, None] * row_stride + head * head_stride + dk[None, :],
        mask=(within[:, None] < count) & (dk[None, :] < DK),
        other=0.0,
    )
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DVP], tl.float32)
    end = tl.minimum(context, past + first + M)
    begin = 0
    low = 0
    if WINDOW > 0:
        low = tl.maximum(0, past + first - WINDOW + 1)
        begin = low // N * N
        clear = begin
    else:
        clear = (past + first + 1) // N * N  # up to here every row sees every token
        acc, top, total = _over(
            acc, top, total, q, keys, values, key_scales, value_scales, table, scale, block_stride,
            kv_head, position, begin, clear, low, context,
            BLOCK, KV_HEADS, DK, DV, DKP, DVP, N, WINDOW, SOFTCAP, False, PRECISION, SCALED,
        )  # fmt: skip
    acc, top, total = _over(
        acc, top, total, q, keys, values, key_scales, value_scales, table, scale, block_stride,
        kv_head, position, clear, end, low, context,
        BLOCK, KV_HEADS, DK, DV, DKP, DVP, N, WINDOW, SOFTCAP, True, PRECISION, SCALED,
    )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(top, sink)
        total = total * tl.exp2(top - higher) + tl.exp2(sink - higher)
        acc = acc * tl.exp2(top - higher)[:, None]
    tl.store(
        out + at[:, None] * out_stride + head * DV + dv[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=(within[:, None] < count) & (dv[None, :] < DV),
    )


_chunks = kernel(_chunk_tiles, "tile_stride")
