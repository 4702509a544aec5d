"""Attention of one row over the blocks of its context, within a step that is one call."""

from __future__ import annotations

import numba
import numpy as np

from penstock.worker.backends.cpu.kernels.access import floats_at
from penstock.worker.backends.cpu.kernels.loops import OPTIONS, dot
from penstock.worker.backends.cpu.kernels.vectors import (
    added,
    exponential,
    larger,
    largest,
    less,
    load_floats,
    splat,
    store_floats,
    times,
    times_add,
    total,
)

_AT_ONCE = 4  # keys
_LANES = 16
_BYTES = 4  # of a number


@numba.njit(**OPTIONS)
def _score(query, address, count, token, scale, scores):  # type: ignore[no-untyped-def]
    """Of so many keys that lie `token` numbers apart; four at once, whose sums do not wait."""
    width = query.shape[0]
    even, whole = width - width % _LANES, count - count % _AT_ONCE
    for slot in range(0, whole, _AT_ONCE):
        at = address + slot * token * _BYTES
        k0, k1 = floats_at(at, width), floats_at(at + token * _BYTES, width)
        k2, k3 = (
            floats_at(at + 2 * token * _BYTES, width),
            floats_at(at + 3 * token * _BYTES, width),
        )
        s0 = s1 = s2 = s3 = splat(np.float32(0.0))
        for i in range(0, even, _LANES):
            x = load_floats(query, i)
            s0 = times_add(load_floats(k0, i), x, s0)
            s1 = times_add(load_floats(k1, i), x, s1)
            s2 = times_add(load_floats(k2, i), x, s2)
            s3 = times_add(load_floats(k3, i), x, s3)
        t0, t1, t2, t3 = total(s0), total(s1), total(s2), total(s3)
        for i in range(even, width):
            t0 += k0[i] * query[i]
            t1 += k1[i] * query[i]
            t2 += k2[i] * query[i]
            t3 += k3[i] * query[i]
        scores[slot], scores[slot + 1] = t0 * scale, t1 * scale
        scores[slot + 2], scores[slot + 3] = t2 * scale, t3 * scale
    for slot in range(whole, count):
        key = floats_at(address + slot * token * _BYTES, width)
        scores[slot] = dot(query, key, width) * scale


@numba.njit(**OPTIONS)
def _weigh(scores, count, best, shares):  # type: ignore[no-untyped-def]
    """Scores as exponentials; the new maximum and their sum. There is room for whole vectors."""
    padded = (count + _LANES - 1) // _LANES * _LANES
    for slot in range(count, padded):
        scores[slot] = -np.inf  # which weighs next to nothing
    most = load_floats(scores, 0)
    for first in range(_LANES, padded, _LANES):
        most = larger(most, load_floats(scores, first))
    peak = max(best, largest(most))
    sums = splat(np.float32(0.0))
    for first in range(0, padded, _LANES):
        weights = exponential(less(load_floats(scores, first), splat(peak)))
        store_floats(shares, first, weights)
        sums = added(sums, weights)
    return peak, total(sums)


@numba.njit(**OPTIONS)
def attend(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    query, seen, keys, values, table, layout, scratch, answer
):
    """One head of one row over its context: the blocks that scratch has room for at a time,
    rescaled as the maximum grows."""
    start, context, scale = seen
    width, stride, token, tokens = layout
    scores, shares = scratch
    best, weight = np.float32(-np.inf), np.float32(0.0)
    for i in range(width):
        answer[i] = np.float32(0.0)
    block, end = start // tokens, (context + tokens - 1) // tokens
    some = max(1, scores.shape[0] // tokens)
    while block < end:
        last, count = min(end, block + some), 0
        for number in range(block, last):
            low, high = _of_block(number, start, context, tokens)
            at = keys + (np.int64(table[number]) * stride + low * token) * _BYTES
            _score(query, at, high - low, token, scale, scores[count:])
            count += high - low
        peak, subtotal = _weigh(scores, count, best, shares)
        shrink = np.float32(0.0) if best == -np.inf else np.exp(best - peak)
        weight = weight * shrink + subtotal
        best, count = peak, 0
        for number in range(block, last):
            low, high = _of_block(number, start, context, tokens)
            at = values + (np.int64(table[number]) * stride + low * token) * _BYTES
            _add_values(answer, shrink, shares[count:], at, high - low, token)
            shrink = np.float32(1.0)
            count += high - low
        block = last
    for i in range(width):
        answer[i] /= weight


@numba.njit(**OPTIONS)
def _of_block(number, start, context, tokens):  # type: ignore[no-untyped-def]
    """Which of its slots are seen."""
    first = number * tokens
    return max(0, start - first), min(tokens, context - first)


@numba.njit(**OPTIONS)
def _add_values(answer, shrink, shares, address, count, token):  # type: ignore[no-untyped-def]
    width = answer.shape[0]
    even, wide, scale = width - width % _LANES, width - width % (4 * _LANES), splat(shrink)
    for i in range(0, wide, 4 * _LANES):
        s0 = times(load_floats(answer, i), scale)
        s1 = times(load_floats(answer, i + _LANES), scale)
        s2 = times(load_floats(answer, i + 2 * _LANES), scale)
        s3 = times(load_floats(answer, i + 3 * _LANES), scale)
        for slot in range(count):
            value = floats_at(address + slot * token * _BYTES, width)
            share = splat(shares[slot])
            s0 = times_add(load_floats(value, i), share, s0)
            s1 = times_add(load_floats(value, i + _LANES), share, s1)
            s2 = times_add(load_floats(value, i + 2 * _LANES), share, s2)
            s3 = times_add(load_floats(value, i + 3 * _LANES), share, s3)
        store_floats(answer, i, s0)
        store_floats(answer, i + _LANES, s1)
        store_floats(answer, i + 2 * _LANES, s2)
        store_floats(answer, i + 3 * _LANES, s3)
    for i in range(wide, even, _LANES):
        sums = times(load_floats(answer, i), scale)
        for slot in range(count):
            value = floats_at(address + slot * token * _BYTES, width)
            sums = times_add(load_floats(value, i), splat(shares[slot]), sums)
        store_floats(answer, i, sums)
    for i in range(even, width):
        one = answer[i] * shrink
        for slot in range(count):
            one += floats_at(address + slot * token * _BYTES, width)[i] * shares[slot]
        answer[i] = one
