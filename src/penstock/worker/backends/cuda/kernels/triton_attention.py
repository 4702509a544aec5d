"""Decode attention over the arena, in Triton.

Decodes are shared out in work items, each a run of one sequence's tokens, so that a long context
beside short ones keeps every multiprocessor busy. The grid is as large as the most items there
can be, so a captured launch serves any contexts. The last item of a sequence to finish adds up
what the others left.

Knows tables, not sequences: `Paging` comes from whoever lays out the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.worker.backends.cuda.kernels.paging import Paging, decode_tiling
from penstock.worker.backends.cuda.kernels.triton_kv import kernel, padded, scales_of

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.worker.kv.layout.layer_blocks import LayerBlocks
    from penstock.worker.models.kernels.interface import Masking


class Scratch:
    """Partial sums of split decodes, made at first use: captured launches keep pointing at them."""

    def __init__(self, device: torch.device, items: int, decodes: int) -> None:
        self._device = device
        self._items = items
        self._decodes = decodes
        self._made: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def of(self, kv_heads: int, group: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sums [items, kv_heads, group, width], their tops and totals, and arrivals (zeros)."""
        key = (kv_heads, group, width)
        if key not in self._made:
            rows = self._items * kv_heads * group
            self._made[key] = (
                torch.empty(rows * width, dtype=torch.float32, device=self._device),
                torch.empty(rows * 2, dtype=torch.float32, device=self._device),
                torch.zeros(self._decodes * kv_heads, dtype=torch.int32, device=self._device),
            )
        return self._made[key]


def decode(
    rows: Tensor,
    blocks: LayerBlocks,
    paging: Paging,
    masking: Masking,
    out: Tensor,
    scratch: Scratch,
    early: bool = False,
) -> None:
    """The first `decodes` of `rows` [T, heads, dim], each over its own context."""
    heads, kv_heads, (key_dim, value_dim) = rows.shape[1], blocks.kv_heads, blocks.dims
    tiling = decode_tiling(max(key_dim, value_dim), rows.dtype, paging.decodes)
    group = heads // kv_heads
    padded_group = padded(group)
    _decode[(paging.item_count, kv_heads)](
        rows,
        blocks.keys,
        blocks.values,
        *scales_of(blocks),
        out,
        *scratch.of(kv_heads, padded_group, value_dim),
        masking.sinks if masking.sinks is not None else rows,
        paging.tables,
        paging.starts,
        paging.contexts,
        paging.items,
        paging.items.stride(0),
        paging.counts,
        masking.scale,
        *rows.stride()[:2],
        out.stride(0),
        blocks.keys.stride(0),
        BLOCK=blocks.block_tokens,
        KV_HEADS=kv_heads,
        GROUP=group,
        GP=padded_group,
        DK=key_dim,
        DV=value_dim,
        DKP=padded(key_dim),
        DVP=padded(value_dim),
        N=tiling.columns,
        WINDOW=masking.window or 0,
        SOFTCAP=masking.softcap or 0.0,
        SINKS=masking.sinks is not None,
        PRECISION=precision(rows.dtype),
        SCALED=blocks.scales is not None,
        EARLY=early,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        launch_pdl=early,
    )


def precision(dtype: torch.dtype) -> str:
    """How products of float32 are taken: as torch is told to."""
    if dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32:
        return "ieee"
    return "tf32"


@triton.jit  # type: ignore[untyped-decorator]
def scores(  # type: ignore[no-untyped-def]
    q,
    k,
    k_scales,
    scale,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Logits in base 2. Codes are exact in the numbers of `q`; their scales come after the sum."""
    s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
    if SCALED:
        s = s * k_scales.to(tl.float32)[None, :]
    if SOFTCAP > 0.0:
        grown = tl.exp2(s * (scale * 2.0 * 1.4426950408889634 / SOFTCAP))
        s = SOFTCAP * (1.0 - 2.0 / (1.0 + grown))  # cap x tanh
        return s * 1.4426950408889634
    return s * (scale * 1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def weighed(acc, p, v, v_scales, like, PRECISION: tl.constexpr, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    """`acc` and what values [N, dim] add to it by weights [M, N]."""
    if SCALED:
        p = p * v_scales.to(tl.float32)[None, :]
    return tl.dot(p.to(like.dtype), v.to(like.dtype), acc, input_precision=PRECISION)


def _decode_items(  # type: ignore[no-untyped-def]
    rows,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    sums,
    tops,
    arrivals,
    sinks,
    tables,
    starts,
    contexts,
    items,
    item_stride,
    counts,
    scale,
    row_stride,
    head_stride,
    out_stride,
    block_stride,
    BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.load(items + item)
    if sequence >= 0:
        begin = tl.load(items + item_stride + item)
        end = tl.load(items + 2 * item_stride + item)
        number = tl.load(items + 3 * item_stride + item)
        table = tables + tl.load(starts + sequence)
        low = begin
        if WINDOW > 0:
            low = tl.maximum(begin, tl.load(contexts + sequence) - WINDOW)
        member = tl.arange(0, GP)
        head = kv_head * GROUP + member
        dk = tl.arange(0, DKP)
        dv = tl.arange(0, DVP)
        q = tl.load(
            rows + sequence.to(tl.int64) * row_stride + head[:, None] * head_stride + dk[None, :],
            mask=(member[:, None] < GROUP) & (dk[None, :] < DK),
            other=0.0,
        )
        top = tl.full([GP], float("-inf"), tl.float32)
        total = tl.zeros([GP], tl.float32)
        acc = tl.zeros([GP, DVP], tl.float32)
        for first in range(low // N * N, end, N):
            token = first + tl.arange(0, N)
            there = (token < end) & (token >= low)
            block = tl.load(table + token // BLOCK, mask=there, other=0).to(tl.int64)
            base = block * block_stride
            place = (token % BLOCK) * KV_HEADS + kv_head
            k = tl.load(
                keys + (base + place * DK)[:, None] + dk[None, :],
                mask=there[:, None] & (dk[None, :] < DK),
                other=0.0,
            )
            v = tl.load(
                values + (base + place * DV)[:, None] + dv[None, :],
                mask=there[:, None] & (dv[None, :] < DV),
                other=0.0,
            )
            k_scales = place
            v_scales = place
            if SCALED:
                scale_at = base // 2 + place
                k_scales = tl.load(key_scales + scale_at, mask=there, other=0.0)
                v_scales = tl.load(value_scales + scale_at, mask=there, other=0.0)
            s = scores(q, k, k_scales, scale, SOFTCAP, PRECISION, SCALED)
            s = tl.where(there[None, :], s, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            # Nothing seen yet: a difference of two infinities is not a number.
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(s - anchor[:, None])
            shrink = tl.exp2(top - anchor)
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None]
            acc = weighed(acc, p, v, v_scales, q, PRECISION, SCALED)
            top = higher
        count = tl.load(counts + sequence)
        last = count == 1
        if count > 1:
            place_of = (item * KV_HEADS + kv_head) * GP + member
            tl.store(sums + place_of[:, None] * DV + dv[None, :], acc, mask=dv[None, :] < DV)
            tl.store(tops + 2 * place_of, top)
            tl.store(tops + 2 * place_of + 1, total)
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals + sequence * KV_HEADS + kv_head, 1, sem="acq_rel")
            last = arrived == count - 1
            if last:
                tl.debug_barrier()
                top = tl.full([GP], float("-inf"), tl.float32)
                total = tl.zeros([GP], tl.float32)
                acc = tl.zeros([GP, DVP], tl.float32)
                for part in range(item - number, item - number + count):
                    from_place = (part * KV_HEADS + kv_head) * GP + member
                    # Past the first-level cache, which may hold what stood there before.
                    part_top = tl.load(tops + 2 * from_place, cache_modifier=".cg")
                    part_total = tl.load(tops + 2 * from_place + 1, cache_modifier=".cg")
                    part_acc = tl.load(
                        sums + from_place[:, None] * DV + dv[None, :],
                        mask=dv[None, :] < DV,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    higher = tl.maximum(top, part_top)
                    anchor = tl.where(higher == float("-inf"), 0.0, higher)
                    old = tl.exp2(top - anchor)
                    new = tl.exp2(part_top - anchor)
                    total = total * old + part_total * new
                    acc = acc * old[:, None] + part_acc * new[:, None]
                    top = higher
                tl.store(arrivals + sequence * KV_HEADS + kv_head, 0)
        if last:
            if SINKS:
                sink = tl.load(sinks + head, mask=member < GROUP, other=0.0).to(tl.float32)
                sink = sink * 1.4426950408889634
                higher = tl.maximum(top, sink)
                total = total * tl.exp2(top - higher) + tl.exp2(sink - higher)
                acc = acc * tl.exp2(top - higher)[:, None]
            answer = acc / total[:, None]
            tl.store(
                out + sequence.to(tl.int64) * out_stride + head[:, None] * DV + dv[None, :],
                answer.to(out.dtype.element_ty),
                mask=(member[:, None] < GROUP) & (dv[None, :] < DV),
            )


_decode = kernel(_decode_items, "item_stride")
