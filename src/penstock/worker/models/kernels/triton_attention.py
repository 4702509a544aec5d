"""KV into the arena and decode attention over it, in Triton.

Decodes are shared out in work items, each a run of one sequence's tokens, so that a long context
beside short ones keeps every multiprocessor busy. The grid is as large as the most items there
can be, so a captured launch serves any contexts. The last item of a sequence to finish adds up
what the others left.

Knows tables, not sequences: `Paging` comes from whoever lays out the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.worker.models.kernels.paging import Paging, decode_tiling

if TYPE_CHECKING:
    from torch import Tensor

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


def store(
    new_keys: Tensor, new_values: Tensor, keys: Tensor, values: Tensor, slots: Tensor
) -> None:
    """Write rows' KV, [T, kv_heads, dim], to their places."""
    kv_heads, key_dim, value_dim = keys.shape[2], keys.shape[3], values.shape[3]
    _store[(new_keys.shape[0], kv_heads)](
        new_keys,
        new_values,
        keys,
        values,
        slots,
        *new_keys.stride()[:2],
        *new_values.stride()[:2],
        keys.stride(0),
        BLOCK=keys.shape[1],
        KV_HEADS=kv_heads,
        DK=key_dim,
        DV=value_dim,
        DKP=padded(key_dim),
        DVP=padded(value_dim),
        num_warps=1,
    )


def decode(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    paging: Paging,
    masking: Masking,
    out: Tensor,
    scratch: Scratch,
    early: bool = False,
) -> None:
    """The first `decodes` of `rows` [T, heads, dim], each over its own context."""
    heads, kv_heads = rows.shape[1], keys.shape[2]
    key_dim, value_dim = keys.shape[3], values.shape[3]
    tiling = decode_tiling(max(key_dim, value_dim), keys.dtype, paging.decodes)
    group = heads // kv_heads
    padded_group = padded(group)
    _decode[(paging.item_count, kv_heads)](
        rows,
        keys,
        values,
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
        keys.stride(0),
        BLOCK=keys.shape[1],
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
        PRECISION=precision(keys.dtype),
        EARLY=early,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        launch_pdl=early,
    )


def padded(dim: int) -> int:
    """What a tile has for a dimension: a power of two that the matrix units take."""
    return max(16, 1 << (dim - 1).bit_length())


def precision(dtype: torch.dtype) -> str:
    """How products of float32 are taken: as torch is told to."""
    if dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32:
        return "ieee"
    return "tf32"


def kernel(function: Any, *varying: str) -> Any:
    """Compiled once per shape of model: numbers that change from step to step make no variants."""
    return triton.jit(function, do_not_specialize=list(varying))


def _store_rows(  # type: ignore[no-untyped-def]
    new_keys,
    new_values,
    keys,
    values,
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
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row)
    block = (slot // BLOCK).to(tl.int64) * block_stride
    place = slot % BLOCK
    dk = tl.arange(0, DKP)
    dv = tl.arange(0, DVP)
    key = tl.load(new_keys + row * key_row_stride + head * key_head_stride + dk, mask=dk < DK)
    tl.store(keys + block + (place * KV_HEADS + head) * DK + dk, key, mask=dk < DK)
    value = tl.load(
        new_values + row * value_row_stride + head * value_head_stride + dv, mask=dv < DV
    )
    tl.store(values + block + (place * KV_HEADS + head) * DV + dv, value, mask=dv < DV)


_store = kernel(_store_rows)


@triton.jit  # type: ignore[untyped-decorator]
def scores(q, k, scale, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits in base 2."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP > 0.0:
        grown = tl.exp2(s * (scale * 2.0 * 1.4426950408889634 / SOFTCAP))
        s = SOFTCAP * (1.0 - 2.0 / (1.0 + grown))  # cap x tanh
        return s * 1.4426950408889634
    return s * (scale * 1.4426950408889634)


def _decode_items(  # type: ignore[no-untyped-def]
    rows,
    keys,
    values,
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
            s = scores(q, k, scale, SOFTCAP, PRECISION)
            s = tl.where(there[None, :], s, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            # Nothing seen yet: a difference of two infinities is not a number.
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(s - anchor[:, None])
            shrink = tl.exp2(top - anchor)
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
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
