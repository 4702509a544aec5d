"""Loops over float32 rows, compiled by Numba once per machine and kept in its cache."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from penstock.worker.backends.cpu.kernels.vectors import (
    LANES,
    load_floats,
    splat,
    store_floats,
    times,
    times_add,
    total,
)

# Sums in any order, and no more: a compiler that may assume that there is no NaN may do anything
# when one row has one, and its neighbours in the step would pay for it.
OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "arcp", "nsz"},
    "error_model": "numpy",
    "nogil": True,
    "cache": True,
}


def compiled(function: Any) -> Any:
    return numba.njit(function, parallel=True, **OPTIONS)


# Too little work to share out.
@numba.njit(**OPTIONS)
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


@numba.njit(**OPTIONS)
def dot(one, other, size):  # type: ignore[no-untyped-def]
    """The sum of products of so many numbers."""
    sums, even = splat(np.float32(0.0)), size - size % LANES
    for i in range(0, even, LANES):
        sums = times_add(load_floats(one, i), load_floats(other, i), sums)
    answer = total(sums)
    for i in range(even, size):
        answer += one[i] * other[i]
    return answer


@numba.njit(**OPTIONS)
def norm_row(row, weight, epsilon, answer):  # type: ignore[no-untyped-def]
    """What `rms_norm` does, for one row."""
    width = answer.shape[0]
    even = width - width % LANES
    mean = dot(row, row, width) / np.float32(width)
    factor = np.float32(1.0) / np.sqrt(mean + epsilon)
    scale = splat(factor)
    for i in range(0, even, LANES):
        normed = times(load_floats(row, i), scale)
        store_floats(answer, i, times(load_floats(weight, i), normed))
    for i in range(even, width):
        answer[i] = weight[i] * (row[i] * factor)


@numba.njit(**OPTIONS)
def tile(weight, n, rows, m, out, column):  # type: ignore[no-untyped-def]
    """Four rows from `m` on times four weights from `n` on: 16 sums stay in registers."""
    w0, w1, w2, w3 = weight[n], weight[n + 1], weight[n + 2], weight[n + 3]
    x0, x1, x2, x3 = rows[m], rows[m + 1], rows[m + 2], rows[m + 3]
    zero = np.float32(0.0)
    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = zero
    s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = zero
    for k in range(rows.shape[1]):
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
    c0, c1, c2, c3 = column, column + 1, column + 2, column + 3
    out[m, c0], out[m, c1], out[m, c2], out[m, c3] = s00, s01, s02, s03
    m1, m2, m3 = m + 1, m + 2, m + 3
    out[m1, c0], out[m1, c1], out[m1, c2], out[m1, c3] = s10, s11, s12, s13
    out[m2, c0], out[m2, c1], out[m2, c2], out[m2, c3] = s20, s21, s22, s23
    out[m3, c0], out[m3, c1], out[m3, c2], out[m3, c3] = s30, s31, s32, s33


@compiled
def few_rows(rows, weight, out, parts):  # type: ignore[no-untyped-def]
    """Each part takes a share of the weight, in tiles of four weight rows by four rows."""
    groups = weight.shape[0] // 4
    for part in numba.prange(parts):
        for group in range(groups * part // parts, groups * (part + 1) // parts):
            for m in range(0, rows.shape[0], 4):
                tile(weight, group * 4, rows, m, out, group * 4)
