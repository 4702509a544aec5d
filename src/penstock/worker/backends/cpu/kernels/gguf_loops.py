"""Products with GGUF blocks in place: codes become numbers in registers. Compiled by Numba.

One float32 row is multiplied as codes are decoded; for a few rows, four outputs are decoded into
the processor's cache first; for many, whole tiles.
"""

from __future__ import annotations

import numba
import numpy as np

from penstock.worker.backends.cpu.kernels.gguf_codes import (
    EXACT,
    OF_Q4_0,
    OF_Q4_1,
    OF_Q4_K,
    OF_Q5_0,
    OF_Q5_K,
    OF_Q6_K,
    OF_Q8_0,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_K,
    Q8_0,
    add_block,
    decode,
)
from penstock.worker.backends.cpu.kernels.loops import OPTIONS, compiled, tile
from penstock.worker.backends.cpu.kernels.vectors import (
    added,
    load_floats,
    prefetch,
    splat,
    store_floats,
    total,
)

_AHEAD = 8192  # bytes: codes are brought near so long before they are wanted


@numba.njit(**OPTIONS)
def _dots(kind, size, row, block_sums, codes, row_bytes, span, out):  # type: ignore[no-untyped-def]
    """Four outputs at once, so that the processor has always something to do."""
    blocks, zero = row_bytes // size, np.float32(0.0)
    last = span[1] - 1
    for first in range(span[0], span[1], 4):
        # At the end of the span one output may be computed more than once.
        one, two, three = min(first + 1, last), min(first + 2, last), min(first + 3, last)
        at0, at1, at2, at3 = (
            first * row_bytes, one * row_bytes, two * row_bytes, three * row_bytes,
        )  # fmt: skip
        s0 = s1 = s2 = s3 = splat(zero)
        m0 = m1 = m2 = m3 = zero
        ahead = at0 + _AHEAD
        for step in range(blocks):
            # Four places at once: the processor does not see that they are one stretch.
            for line in range(ahead, ahead + 4 * size, 64):
                prefetch(codes, line)
            ahead += 4 * size
            s0, least = add_block(kind, codes, at0, row, block_sums, step, s0)
            m0 += least
            s1, least = add_block(kind, codes, at1, row, block_sums, step, s1)
            m1 += least
            s2, least = add_block(kind, codes, at2, row, block_sums, step, s2)
            m2 += least
            s3, least = add_block(kind, codes, at3, row, block_sums, step, s3)
            m3 += least
            at0, at1, at2, at3 = at0 + size, at1 + size, at2 + size, at3 + size
        out[first], out[one] = total(s0) + m0, total(s1) + m1
        out[two], out[three] = total(s2) + m2, total(s3) + m3


@numba.njit(**OPTIONS)
def _dots_one(kind, size, row, block_sums, codes, row_bytes, span, out):  # type: ignore[no-untyped-def]
    """One output after the other, for large blocks."""
    blocks, zero = row_bytes // size, np.float32(0.0)
    for output in range(span[0], span[1]):
        at = output * row_bytes
        sums, mins = splat(zero), zero
        for step in range(blocks):
            sums, least = add_block(kind, codes, at + step * size, row, block_sums, step, sums)
            mins += least
        out[output] = total(sums) + mins


@numba.njit(**OPTIONS)
def add_up_blocks(row, block_sums):  # type: ignore[no-untyped-def]
    """The sums of 32 inputs each, by which mins are multiplied."""
    for step in range(row.shape[0] // 32):
        both = added(load_floats(row, step * 32), load_floats(row, step * 32 + 16))
        block_sums[step] = total(both)


@numba.njit(**EXACT)
def _decoded(kind, codes, row_bytes, span, out):  # type: ignore[no-untyped-def]
    width = out.shape[1]
    for output in range(span[0], span[1]):
        numbers = out[output - span[0]]
        for step in range(width // 32):
            first, second = decode(kind, codes, output * row_bytes, step)
            store_floats(numbers, step * 32, first)
            store_floats(numbers, step * 32 + 16, second)


@numba.njit(**EXACT)
def decode_any(kind, codes, row_bytes, span, out):  # type: ignore[no-untyped-def]
    if kind == Q4_0:
        _decoded(OF_Q4_0, codes, row_bytes, span, out)
    elif kind == Q4_1:
        _decoded(OF_Q4_1, codes, row_bytes, span, out)
    elif kind == Q5_0:
        _decoded(OF_Q5_0, codes, row_bytes, span, out)
    elif kind == Q8_0:
        _decoded(OF_Q8_0, codes, row_bytes, span, out)
    elif kind == Q4_K:
        _decoded(OF_Q4_K, codes, row_bytes, span, out)
    elif kind == Q5_K:
        _decoded(OF_Q5_K, codes, row_bytes, span, out)
    else:
        _decoded(OF_Q6_K, codes, row_bytes, span, out)


@numba.njit(**OPTIONS)
def dot_any(kind, row, block_sums, codes, row_bytes, span, out):  # type: ignore[no-untyped-def]
    if kind == Q4_0:
        _dots(OF_Q4_0, 18, row, block_sums, codes, row_bytes, span, out)
    elif kind == Q4_1:
        _dots(OF_Q4_1, 20, row, block_sums, codes, row_bytes, span, out)
    elif kind == Q5_0:
        _dots(OF_Q5_0, 22, row, block_sums, codes, row_bytes, span, out)
    elif kind == Q8_0:
        _dots(OF_Q8_0, 34, row, block_sums, codes, row_bytes, span, out)
    elif kind == Q4_K:
        _dots_one(OF_Q4_K, 144, row, block_sums, codes, row_bytes, span, out)
    elif kind == Q5_K:
        _dots_one(OF_Q5_K, 176, row, block_sums, codes, row_bytes, span, out)
    else:
        _dots_one(OF_Q6_K, 210, row, block_sums, codes, row_bytes, span, out)


@compiled
def one_row(kind, row, codes, row_bytes, out, parts):  # type: ignore[no-untyped-def]
    """`row` [in] times all outputs; each part takes a share of them."""
    outputs = out.shape[0]
    block_sums = np.empty(row.shape[0] // 32, np.float32)
    add_up_blocks(row, block_sums)
    for part in numba.prange(parts):
        span = outputs * part // parts, outputs * (part + 1) // parts
        dot_any(kind, row, block_sums, codes, row_bytes, span, out)


@compiled
def few_rows(kind, rows, codes, row_bytes, scratch, out):  # type: ignore[no-untyped-def]
    """Rows [multiple of 4, in]; `scratch` [parts, 4, in] is each part's own."""
    parts, groups = scratch.shape[0], out.shape[1] // 4
    for part in numba.prange(parts):
        numbers = scratch[part]
        for group in range(groups * part // parts, groups * (part + 1) // parts):
            first = group * 4
            decode_any(kind, codes, row_bytes, (first, first + 4), numbers)
            for m in range(0, rows.shape[0], 4):
                tile(numbers, 0, rows, m, out, first)


@compiled
def dequantise(kind, codes, row_bytes, begin, out, parts):  # type: ignore[no-untyped-def]
    """The numbers of outputs from `begin` on into `out` [outputs, in]."""
    count = out.shape[0]
    for part in numba.prange(parts):
        first, last = count * part // parts, count * (part + 1) // parts
        decode_any(kind, codes, row_bytes, (begin + first, begin + last), out[first:last])
