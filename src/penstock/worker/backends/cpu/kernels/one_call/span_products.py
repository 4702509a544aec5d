"""Some outputs of a weight for a few rows, of any kind. Compiled by Numba, once.

Called by its address from other compiled code: whatever that is linked into is compiled again with
all it calls, and this has loops for every kind of weight.
"""

from __future__ import annotations

from functools import cache

import numba
import numpy as np

from penstock.worker.backends.cpu.kernels.access import bytes_at, floats_at, matrix_at
from penstock.worker.backends.cpu.kernels.gguf_loops import decode_any, dot_any
from penstock.worker.backends.cpu.kernels.loops import OPTIONS, tile
from penstock.worker.backends.cpu.kernels.vectors import (
    load_floats,
    prefetch,
    splat,
    times_add,
    total,
)

PLAIN = 0  # float32: the kind beside those of GGUF's blocks
TILE = 4  # rows and outputs that are multiplied together
ONE_BY_ONE = 2  # rows that are multiplied one after the other
_LANES = 16
_LINE = 64  # bytes
_BYTES = 4  # of a number


@numba.njit(**OPTIONS)
def _plain_dots(row, weight, span, out):  # type: ignore[no-untyped-def]
    """Four outputs at once: as many streams of weights, and sums that do not wait."""
    width = row.shape[0]
    even = width - width % _LANES
    last = span[1] - 1
    for first in range(span[0], span[1], TILE):
        # At the end of the span one output may be computed more than once.
        one, two, three = min(first + 1, last), min(first + 2, last), min(first + 3, last)
        w0, w1, w2, w3 = weight[first], weight[one], weight[two], weight[three]
        s0 = s1 = s2 = s3 = splat(np.float32(0.0))
        for i in range(0, even, _LANES):
            x = load_floats(row, i)
            s0 = times_add(load_floats(w0, i), x, s0)
            s1 = times_add(load_floats(w1, i), x, s1)
            s2 = times_add(load_floats(w2, i), x, s2)
            s3 = times_add(load_floats(w3, i), x, s3)
        t0, t1, t2, t3 = total(s0), total(s1), total(s2), total(s3)
        for i in range(even, width):
            t0 += w0[i] * row[i]
            t1 += w1[i] * row[i]
            t2 += w2[i] * row[i]
            t3 += w3[i] * row[i]
        out[first], out[one], out[two], out[three] = t0, t1, t2, t3


@numba.njit(**OPTIONS)
def _multiply_plain(address, span, whole, rows, count, out, column):  # type: ignore[no-untyped-def]
    width = rows.shape[1]
    weight, codes = matrix_at(address, span[1], width), bytes_at(address, 0)
    group = TILE * width * _BYTES
    for first in range(span[0], whole, TILE):
        # Four places at once: the processor does not see that they are one stretch.
        at = first * width * _BYTES + group
        for line in range(at, at + group, _LINE):
            prefetch(codes, line)
        for m in range(0, count, TILE):
            tile(weight, first, rows, m, out, column + first)
    if whole < span[1]:
        for m in range(count):
            answer = out[m, column : column + span[1]]
            _plain_dots(rows[m], weight, (whole, span[1]), answer)


def _multiply(  # type: ignore[no-untyped-def]
    address, kind, row_bytes, begin, end, count, rows_at, width, sums_at, blocks, memory_at, out_at,
    out_width, column,
):  # fmt: skip
    padded = (count + TILE - 1) // TILE * TILE
    rows, out = matrix_at(rows_at, padded, width), matrix_at(out_at, padded, out_width)
    whole = begin if count <= ONE_BY_ONE else end - (end - begin) % TILE
    if kind == PLAIN:
        _multiply_plain(address, (begin, end), whole, rows, count, out, column)
        return
    codes, numbers = bytes_at(address, end * row_bytes), matrix_at(memory_at, TILE, width)
    for first in range(begin, whole, TILE):
        decode_any(kind, codes, row_bytes, (first, first + TILE), numbers)
        for m in range(0, count, TILE):
            tile(numbers, 0, rows, m, out, column + first)
    if whole < end:
        for m in range(count):
            block_sums = floats_at(sums_at + m * blocks * _BYTES, blocks)
            answer = out[m, column : column + end]
            dot_any(kind, rows[m], block_sums, codes, row_bytes, (whole, end), answer)


@cache
def address() -> int:
    """Of a function of 14 int64: a weight's address, kind and bytes of an output; the outputs from
    which to which; how many rows, where and how wide they are; where the sums of their blocks of
    32 are and how many are apart; where there is memory for a tile of weights; where the answers
    go, how wide a row of these is and the column of output 0.

    Rows and answers have room for whole tiles of rows, which may have anything in them.
    """
    compiled = numba.cfunc(numba.void(*[numba.int64] * 14), cache=True, error_model="numpy")
    found: int = compiled(_multiply).address
    return found
