"""Keys and values on their way to the arena and from it, as numbers or as codes.

What a vector is in the arena is told by the arena's type: float32 stands for itself, int8 are codes
with a scale in bfloat16, to the bit as in `kv/layout/rounding`. Loops are compiled for each.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import overload

from penstock.worker.backends.cpu.kernels.loops import OPTIONS, compiled
from penstock.worker.backends.cpu.kernels.vectors import as_bits, as_number, load_bfloat16
from penstock.worker.kv.layout.rounding import LEAST_SCALE, MOST, SHARE

_LEAST = np.float32(LEAST_SCALE)
_MOST, _SHARE = np.float32(MOST), np.float32(SHARE)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_NO_NUMBER = np.uint16(0x7FC0)


def room_for(arena: Any, dim: Any, other: Any) -> Any:
    """Where a vector of `dim` codes becomes numbers; anything (`other`) where it is some."""


def vector(arena: Any, at: Any, dim: Any, scales: Any, place: Any, room: Any) -> Any:
    """`dim` numbers of the arena from `at` on, whose scale is at `place`."""


@overload(room_for, inline="always")
def _room_for(arena, dim, other):  # type: ignore[no-untyped-def]
    if isinstance(arena.dtype, types.Float):
        return lambda arena, dim, other: other
    return lambda arena, dim, other: np.empty(dim, np.float32)


# Inside the loop that calls it: numbers are read where they are, as if this were not here.
@overload(vector, inline="always")
def _vector(arena, at, dim, scales, place, room):  # type: ignore[no-untyped-def]
    if isinstance(arena.dtype, types.Float):
        # A slice, not sums of indices: with those the compiler cannot vectorise.
        return lambda arena, at, dim, scales, place, room: arena[at : at + dim]
    return lambda arena, at, dim, scales, place, room: _restored(
        arena[at : at + dim], load_bfloat16(scales, place), room
    )


@numba.njit(**OPTIONS)
def _restored(codes, scale, numbers):  # type: ignore[no-untyped-def]
    for i in range(numbers.shape[0]):
        numbers[i] = np.float32(codes[i]) * scale
    return numbers


@compiled
def store(keys, values, arena, offsets, blocks, slots):  # type: ignore[no-untyped-def]
    """Copy each row's keys and values to its slot."""
    key_offset, value_offset, block_stride = offsets
    for row in numba.prange(blocks.shape[0]):
        base = blocks[row] * block_stride
        at = base + key_offset + slots[row] * keys.shape[1]
        arena[at : at + keys.shape[1]] = keys[row]
        at = base + value_offset + slots[row] * values.shape[1]
        arena[at : at + values.shape[1]] = values[row]


@compiled
def store_codes(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    keys, values, arena, offsets, scales, scale_offsets, heads, blocks, slots
):
    """Round each row's keys and values into its slot."""
    key_offset, value_offset, block_stride = offsets
    key_scales, value_scales, scale_stride = scale_offsets
    for row in numba.prange(blocks.shape[0]):
        base, scale_base = blocks[row] * block_stride, blocks[row] * scale_stride
        first = slots[row] * heads
        for numbers, offset, scale_offset in (
            (keys[row], key_offset, key_scales),
            (values[row], value_offset, value_scales),
        ):
            dim = numbers.shape[0] // heads
            for head in range(heads):
                at = base + offset + (first + head) * dim
                place = scale_base + scale_offset + first + head
                _round(numbers[head * dim : (head + 1) * dim], arena[at : at + dim], scales, place)


@numba.njit(**OPTIONS)
def _round(numbers, codes, scales, place):  # type: ignore[no-untyped-def]
    # As integers, since there what is no number is larger than all numbers.
    peak = np.uint32(0)
    for i in range(numbers.shape[0]):
        peak = max(peak, as_bits(numbers[i]) & _MAGNITUDE)
    if peak >= _INFINITY:
        scales[place] = _NO_NUMBER
        for i in range(codes.shape[0]):
            codes[i] = 0
        return
    bits = as_bits(max(as_number(peak) * _SHARE, _LEAST))
    # To bfloat16, halves to even.
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    scales[place] = np.uint16(bits)
    inverse = np.float32(1.0) / as_number(np.uint32(bits << np.uint32(16)))
    for i in range(codes.shape[0]):
        step = np.rint(numbers[i] * inverse)
        codes[i] = np.int8(min(max(step, -_MOST), _MOST))


@compiled
def restore(arena, offset, stride, scales, scale_offset, scale_stride, wanted, dim, out):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """All vectors of some blocks as numbers, [wanted, vectors x dim]."""
    for index in numba.prange(wanted.shape[0]):
        base = wanted[index] * stride + offset
        place = wanted[index] * scale_stride + scale_offset
        for number in range(out.shape[1] // dim):
            at = base + number * dim
            numbers = out[index, number * dim : (number + 1) * dim]
            _restored(arena[at : at + dim], load_bfloat16(scales, place + number), numbers)


@compiled
def decode(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912, PLR0913, PLR0915
    rows, arena, offsets, scales, scale_offsets, sizes, tables, contexts, shaping, sinks, out
):
    """Softmax over each (sequence, KV head) in one pass, rescaled as the maximum grows."""
    key_offset, value_offset, block_stride = offsets
    key_scales, value_scales, scale_stride = scale_offsets
    block_tokens, kv_heads, value_dim = sizes
    scale, window, softcap = np.float32(shaping[0]), shaping[1], np.float32(shaping[2])
    key_dim = rows.shape[2]
    group = rows.shape[1] // kv_heads
    for item in numba.prange(rows.shape[0] * kv_heads):
        scores = np.empty((group, block_tokens), np.float32)
        best = np.full(group, -np.inf, np.float32)
        total = np.zeros(group, np.float32)
        sums = np.zeros((group, value_dim), np.float32)
        key_room, value_room = room_for(arena, key_dim, best), room_for(arena, value_dim, best)
        sequence, kv_head = item // kv_heads, item % kv_heads
        context = contexts[sequence]
        start = max(0, context - window) if window > 0 else 0
        for block in range(start // block_tokens, (context + block_tokens - 1) // block_tokens):
            number = np.int64(tables[sequence, block])
            base, scale_base = number * block_stride, number * scale_stride
            first = block * block_tokens
            low, high = max(0, start - first), min(block_tokens, context - first)
            for slot in range(low, high):
                number = slot * kv_heads + kv_head
                at, place = base + key_offset + number * key_dim, scale_base + key_scales + number
                key = vector(arena, at, key_dim, scales, place, key_room)
                for member in range(group):
                    query = rows[sequence, kv_head * group + member]
                    score = np.float32(0.0)
                    for i in range(key_dim):
                        score += query[i] * key[i]
                    score *= scale
                    if softcap > 0.0:
                        score = np.tanh(score / softcap) * softcap
                    scores[member, slot] = score
            for member in range(group):
                peak = best[member]
                for slot in range(low, high):
                    peak = max(peak, scores[member, slot])
                shrink = np.exp(best[member] - peak)
                best[member] = peak
                subtotal = total[member] * shrink
                for i in range(value_dim):
                    sums[member, i] *= shrink
                for slot in range(low, high):
                    weight = np.exp(scores[member, slot] - peak)
                    scores[member, slot] = weight
                    subtotal += weight
                total[member] = subtotal
            for slot in range(low, high):
                number = slot * kv_heads + kv_head
                at = base + value_offset + number * value_dim
                place = scale_base + value_scales + number
                value = vector(arena, at, value_dim, scales, place, value_room)
                for member in range(group):
                    weight = scores[member, slot]
                    for i in range(value_dim):
                        sums[member, i] += weight * value[i]
        for member in range(group):
            head = kv_head * group + member
            weight = total[member]
            if sinks.shape[0] > 0:
                peak = max(best[member], sinks[head])
                shrink = np.exp(best[member] - peak)
                weight = weight * shrink + np.exp(sinks[head] - peak)
                for i in range(value_dim):
                    sums[member, i] *= shrink
            for i in range(value_dim):
                out[sequence, head, i] = sums[member, i] / weight


@compiled
def decode_drafts(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912, PLR0913, PLR0915
    rows,
    arena,
    offsets,
    scales,
    scale_offsets,
    sizes,
    tables,
    contexts,
    firsts,
    shaping,
    sinks,
    out,
):
    """The same where sequences have several rows, each of which sees one token more than the one
    before it: all rows of a sequence go over a block while it is in the cache.

    `firsts` has the first row of each sequence, and one past the last.
    """
    key_offset, value_offset, block_stride = offsets
    key_scales, value_scales, scale_stride = scale_offsets
    block_tokens, kv_heads, value_dim = sizes
    scale, window, softcap = np.float32(shaping[0]), shaping[1], np.float32(shaping[2])
    key_dim = rows.shape[2]
    group = rows.shape[1] // kv_heads
    for item in numba.prange((firsts.shape[0] - 1) * kv_heads):
        sequence, kv_head = item // kv_heads, item % kv_heads
        first, count = firsts[sequence], firsts[sequence + 1] - firsts[sequence]
        scores = np.empty((count * group, block_tokens), np.float32)
        best = np.full(count * group, -np.inf, np.float32)
        total = np.zeros(count * group, np.float32)
        sums = np.zeros((count * group, value_dim), np.float32)
        key_room, value_room = room_for(arena, key_dim, best), room_for(arena, value_dim, best)
        begin = max(0, contexts[first] - window) if window > 0 else 0
        end = contexts[first + count - 1]
        for block in range(begin // block_tokens, (end + block_tokens - 1) // block_tokens):
            number = np.int64(tables[first, block])
            base, scale_base = number * block_stride, number * scale_stride
            token = block * block_tokens
            low, high = max(0, begin - token), min(block_tokens, end - token)
            for slot in range(low, high):
                number = slot * kv_heads + kv_head
                at, place = base + key_offset + number * key_dim, scale_base + key_scales + number
                key = vector(arena, at, key_dim, scales, place, key_room)
                for mine in range(count * group):
                    query = rows[first + mine // group, kv_head * group + mine % group]
                    score = np.float32(0.0)
                    for i in range(key_dim):
                        score += query[i] * key[i]
                    score *= scale
                    if softcap > 0.0:
                        score = np.tanh(score / softcap) * softcap
                    # What the row does not see weighs nothing below.
                    context = contexts[first + mine // group]
                    seen = token + slot < context
                    if window > 0 and token + slot < context - window:
                        seen = False
                    scores[mine, slot] = score if seen else -np.inf
            for mine in range(count * group):
                peak = best[mine]
                for slot in range(low, high):
                    peak = max(peak, scores[mine, slot])
                if peak == -np.inf:  # it has seen nothing yet
                    for slot in range(low, high):
                        scores[mine, slot] = np.float32(0.0)
                    continue
                shrink = np.exp(best[mine] - peak)
                best[mine] = peak
                subtotal = total[mine] * shrink
                for i in range(value_dim):
                    sums[mine, i] *= shrink
                for slot in range(low, high):
                    weight = np.exp(scores[mine, slot] - peak)
                    scores[mine, slot] = weight
                    subtotal += weight
                total[mine] = subtotal
            for slot in range(low, high):
                number = slot * kv_heads + kv_head
                at = base + value_offset + number * value_dim
                place = scale_base + value_scales + number
                value = vector(arena, at, value_dim, scales, place, value_room)
                for mine in range(count * group):
                    weight = scores[mine, slot]
                    if weight != 0.0:  # what a row does not see may be no number
                        for i in range(value_dim):
                            sums[mine, i] += weight * value[i]
        for mine in range(count * group):
            row, head = first + mine // group, kv_head * group + mine % group
            weight = total[mine]
            if sinks.shape[0] > 0:
                peak = max(best[mine], sinks[head])
                shrink = np.exp(best[mine] - peak)
                weight = weight * shrink + np.exp(sinks[head] - peak)
                for i in range(value_dim):
                    sums[mine, i] *= shrink
            for i in range(value_dim):
                out[row, head, i] = sums[mine, i] / weight
