"""Loops over float32 rows, compiled by Numba once per machine and kept in its cache."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

# Sums in any order, and no more: a compiler that may assume that there is no NaN may do anything
# when one row has one, and its neighbours in the step would pay for it.
_OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "arcp", "nsz"},
    "error_model": "numpy",
    "nogil": True,
    "cache": True,
}


def _compiled(function: Any) -> Any:
    return numba.njit(function, parallel=True, **_OPTIONS)


# Too little work to share out.
@numba.njit(**_OPTIONS)
def rms_norm(rows, weight, epsilon, out):  # type: ignore[no-untyped-def]
    """Each row over the root of its mean square, times the weight."""
    width = rows.shape[1]
    for index in range(rows.shape[0]):
        row, answer = rows[index], out[index]
        squares = np.float32(0.0)
        for i in range(width):
            squares += row[i] * row[i]
        factor = np.float32(1.0) / np.sqrt(squares / np.float32(width) + np.float32(epsilon))
        for i in range(width):
            answer[i] = weight[i] * (row[i] * factor)


@_compiled
def store(keys, values, arena, offsets, blocks, slots):  # type: ignore[no-untyped-def]
    """Copy each row's keys and values to its slot."""
    key_offset, value_offset, block_stride = offsets
    for row in numba.prange(blocks.shape[0]):
        base = blocks[row] * block_stride
        at = base + key_offset + slots[row] * keys.shape[1]
        arena[at : at + keys.shape[1]] = keys[row]
        at = base + value_offset + slots[row] * values.shape[1]
        arena[at : at + values.shape[1]] = values[row]


@_compiled
def few_rows(rows, weight, out, parts):  # type: ignore[no-untyped-def]
    """Each part takes a share of the weight, in tiles of four weight rows by four rows."""
    count, width = rows.shape
    groups = weight.shape[0] // 4
    for part in numba.prange(parts):
        for group in range(groups * part // parts, groups * (part + 1) // parts):
            n = group * 4
            w0, w1, w2, w3 = weight[n], weight[n + 1], weight[n + 2], weight[n + 3]
            for m in range(0, count, 4):
                x0, x1, x2, x3 = rows[m], rows[m + 1], rows[m + 2], rows[m + 3]
                zero = np.float32(0.0)
                s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = zero
                s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = zero
                for k in range(width):
                    a, b, c, d = x0[k], x1[k], x2[k], x3[k]
                    e, f, g, h = w0[k], w1[k], w2[k], w3[k]
                    s00 += a * e
                    s01 += a * f
                    s02 += a * g
                    s03 += a * h
                    s10 += b * e
                    s11 += b * f
                    s12 += b * g
                    s13 += b * h
                    s20 += c * e
                    s21 += c * f
                    s22 += c * g
                    s23 += c * h
                    s30 += d * e
                    s31 += d * f
                    s32 += d * g
                    s33 += d * h
                out[m, n], out[m, n + 1], out[m, n + 2], out[m, n + 3] = s00, s01, s02, s03
                m1, m2, m3 = m + 1, m + 2, m + 3
                out[m1, n], out[m1, n + 1], out[m1, n + 2], out[m1, n + 3] = s10, s11, s12, s13
                out[m2, n], out[m2, n + 1], out[m2, n + 2], out[m2, n + 3] = s20, s21, s22, s23
                out[m3, n], out[m3, n + 1], out[m3, n + 2], out[m3, n + 3] = s30, s31, s32, s33


@_compiled
def decode(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912, PLR0913
    rows, arena, offsets, sizes, tables, contexts, shaping, sinks, out
):
    """Softmax over each (sequence, KV head) in one pass, rescaled as the maximum grows."""
    key_offset, value_offset, block_stride = offsets
    block_tokens, kv_heads, value_dim = sizes
    scale, window, softcap = np.float32(shaping[0]), shaping[1], np.float32(shaping[2])
    key_dim = rows.shape[2]
    group = rows.shape[1] // kv_heads
    for item in numba.prange(rows.shape[0] * kv_heads):
        scores = np.empty((group, block_tokens), np.float32)
        best = np.full(group, -np.inf, np.float32)
        total = np.zeros(group, np.float32)
        sums = np.zeros((group, value_dim), np.float32)
        sequence, kv_head = item // kv_heads, item % kv_heads
        context = contexts[sequence]
        start = max(0, context - window) if window > 0 else 0
        for block in range(start // block_tokens, (context + block_tokens - 1) // block_tokens):
            base = np.int64(tables[sequence, block]) * block_stride
            low = max(0, start - block * block_tokens)
            high = min(block_tokens, context - block * block_tokens)
            # Slices, not sums of indices: with those the compiler cannot vectorise.
            for slot in range(low, high):
                at = base + key_offset + (slot * kv_heads + kv_head) * key_dim
                key = arena[at : at + key_dim]
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
                at = base + value_offset + (slot * kv_heads + kv_head) * value_dim
                value = arena[at : at + value_dim]
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
