"""Loops over recurrent states in place: a row reads its sequence's, moves it on and writes it.

A segment is rows of one sequence that follow each other, so decodes are segments of one row. The
work is shared out by segment and head, and where a head's columns do not need each other, by groups
of them. States are flat: `flat[start + slot * stride + place in the layer's matrices]`.
"""

from __future__ import annotations

import numba
import numpy as np

from penstock.worker.backends.cpu.kernels.loops import OPTIONS, compiled
from penstock.worker.backends.cpu.kernels.vectors import (
    LANES,
    less,
    load_floats,
    splat,
    store_floats,
    times,
    times_add,
    total,
)

WIDE = 4 * LANES  # columns that are computed at once where there are as many


@numba.njit(**OPTIONS)
def _delta_four(flat, base, width, depth, decay, apart, query, key, value, beta, out):  # type: ignore[no-untyped-def]
    """One row over four vectors of columns: `decay` has a number for each `apart` of a key."""
    zero = splat(np.float32(0.0))
    m0, m1, m2, m3 = zero, zero, zero, zero
    for i in range(depth):
        at = base + i * width
        seen = splat(key[i] * decay[i * apart])
        m0 = times_add(load_floats(flat, at), seen, m0)
        m1 = times_add(load_floats(flat, at + LANES), seen, m1)
        m2 = times_add(load_floats(flat, at + 2 * LANES), seen, m2)
        m3 = times_add(load_floats(flat, at + 3 * LANES), seen, m3)
    rate = splat(beta)
    m0 = times(less(load_floats(value, 0), m0), rate)
    m1 = times(less(load_floats(value, LANES), m1), rate)
    m2 = times(less(load_floats(value, 2 * LANES), m2), rate)
    m3 = times(less(load_floats(value, 3 * LANES), m3), rate)
    o0, o1, o2, o3 = zero, zero, zero, zero
    for i in range(depth):
        at = base + i * width
        kept, new, asked = splat(decay[i * apart]), splat(key[i]), splat(query[i])
        s0 = times_add(new, m0, times(load_floats(flat, at), kept))
        s1 = times_add(new, m1, times(load_floats(flat, at + LANES), kept))
        s2 = times_add(new, m2, times(load_floats(flat, at + 2 * LANES), kept))
        s3 = times_add(new, m3, times(load_floats(flat, at + 3 * LANES), kept))
        store_floats(flat, at, s0)
        store_floats(flat, at + LANES, s1)
        store_floats(flat, at + 2 * LANES, s2)
        store_floats(flat, at + 3 * LANES, s3)
        o0 = times_add(s0, asked, o0)
        o1 = times_add(s1, asked, o1)
        o2 = times_add(s2, asked, o2)
        o3 = times_add(s3, asked, o3)
    store_floats(out, 0, o0)
    store_floats(out, LANES, o1)
    store_floats(out, 2 * LANES, o2)
    store_floats(out, 3 * LANES, o3)


@numba.njit(**OPTIONS)
def _delta_one(flat, base, width, depth, decay, apart, query, key, value, beta, out):  # type: ignore[no-untyped-def]
    """The same over one vector of columns."""
    zero = splat(np.float32(0.0))
    missing, answer = zero, zero
    for i in range(depth):
        seen = splat(key[i] * decay[i * apart])
        missing = times_add(load_floats(flat, base + i * width), seen, missing)
    missing = times(less(load_floats(value, 0), missing), splat(beta))
    for i in range(depth):
        at = base + i * width
        kept = times(load_floats(flat, at), splat(decay[i * apart]))
        state = times_add(splat(key[i]), missing, kept)
        store_floats(flat, at, state)
        answer = times_add(state, splat(query[i]), answer)
    store_floats(out, 0, answer)


@compiled
def delta_rule(flat, start, stride, segments, query, key, value, decay, beta, columns, out):  # type: ignore[no-untyped-def]
    """Segments [n, 3] of slot, first row and end; `decay` [T, heads, 1 or key_dim] is a factor."""
    heads, depth, width = key.shape[1], key.shape[2], value.shape[2]
    parts = width // columns
    apart = 1 if decay.shape[2] > 1 else 0
    for unit in numba.prange(segments.shape[0] * heads * parts):
        segment, rest = unit // (heads * parts), unit % (heads * parts)
        head, first = rest // parts, rest % parts * columns
        base = start + segments[segment, 0] * stride + head * depth * width + first
        for t in range(segments[segment, 1], segments[segment, 2]):
            rows = query[t, head], key[t, head], value[t, head, first:], out[t, head, first:]
            if columns == WIDE:
                _delta_four(
                    flat, base, width, depth, decay[t, head], apart,
                    rows[0], rows[1], rows[2], beta[t, head], rows[3],
                )  # fmt: skip
            else:
                _delta_one(
                    flat, base, width, depth, decay[t, head], apart,
                    rows[0], rows[1], rows[2], beta[t, head], rows[3],
                )  # fmt: skip


@compiled
def selective_scan(flat, start, stride, segments, inputs, steps, decay, b, c, skip, out):  # type: ignore[no-untyped-def]
    """Segments as above; `decay` [T, heads] is a factor, `skip` [heads]."""
    heads, depth, width = inputs.shape[1], inputs.shape[2], b.shape[2]
    shared = heads // b.shape[1]
    for unit in numba.prange(segments.shape[0] * heads):
        segment, head = unit // heads, unit % heads
        base = start + segments[segment, 0] * stride + head * depth * width
        group = head // shared
        for t in range(segments[segment, 1], segments[segment, 2]):
            kept, new, asked = splat(decay[t, head]), b[t, group], c[t, group]
            for i in range(depth):
                at = base + i * width
                given = inputs[t, head, i]
                step = splat(steps[t, head] * given)
                sums = splat(np.float32(0.0))
                for j in range(0, width, LANES):
                    old = times(load_floats(flat, at + j), kept)
                    state = times_add(load_floats(new, j), step, old)
                    store_floats(flat, at + j, state)
                    sums = times_add(state, load_floats(asked, j), sums)
                out[t, head, i] = total(sums) + skip[head] * given


@compiled
def convolve(flat, start, stride, slots, rows, weight, bias, out):  # type: ignore[no-untyped-def]
    """Single rows [B, channels] of sequences, each behind its last inputs, which move up by one."""
    channels, columns = weight.shape[0], weight.shape[1] - 1
    for unit in numba.prange(slots.shape[0] * 4):
        row, part = unit // 4, unit % 4
        base = start + slots[row] * stride
        for channel in range(channels * part // 4, channels * (part + 1) // 4):
            at = base + channel * columns
            new = rows[row, channel]
            answer = bias[channel] + weight[channel, columns] * new
            for i in range(columns):
                answer += weight[channel, i] * flat[at + i]
            for i in range(columns - 1):
                flat[at + i] = flat[at + i + 1]
            flat[at + columns - 1] = new
            out[row, channel] = answer
