"""The numbers that packed weights stand for, in Triton: one pass over the codes."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.worker.backends.cuda.kernels.packed.triton_codes import E2M1, byte, nibble
from penstock.worker.backends.cuda.kernels.packed.triton_scales import group_scales


def _unpack_rows(  # type: ignore[no-untyped-def]
    codes,
    scales,
    zeros,
    more,
    out,
    begin,
    end,
    pieces,
    code_stride,
    stride,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    N: tl.constexpr,
    PIECES: tl.constexpr,  # of a program
    ZEROS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Outputs from `begin` to `end` into `out` [outputs, inputs]."""
    WIDE: tl.constexpr = KIND <= E2M1
    S: tl.constexpr = SPAN // (4 if WIDE else 2)
    # As the codes are, where there are zeros: exactly what their format says.
    EIGHT: tl.constexpr = 8.0 if ZEROS > 0 and KIND != E2M1 else 0.0
    row = tl.program_id(0) * N + tl.arange(0, N)
    n = begin + row
    there = n < end
    inside = there[:, None]
    j = tl.arange(0, S)
    at = codes + n.to(tl.int64)[:, None] * code_stride + j[None, :]
    to = out + row.to(tl.int64)[:, None] * (code_stride * (SPAN // S)) + j[None, :]
    dtype = out.dtype.element_ty
    whole = tl.full([N], 1.0, tl.float32)
    if WHOLE:
        whole = tl.load(more + n, mask=there, other=0).to(tl.float32, bitcast=True)
    for index in range(PIECES):
        piece = tl.program_id(1) * PIECES + index
        if piece < pieces:
            first = piece * SPAN
            w = tl.load(at + piece * S, mask=inside, other=0)
            s0 = whole
            s1 = whole
            s2 = whole
            s3 = whole
            m0 = whole
            m1 = whole
            m2 = whole
            m3 = whole
            if GROUP > 0:
                s0, s1, s2, s3, m0, m1, m2, m3 = group_scales(
                    scales + n // BLOCK, zeros + n, more + n, there, first, stride,
                    E2M1 if ZEROS > 0 and WIDE else KIND, SCALE, GROUP, SPAN // 4, ZEROS,
                )  # fmt: skip
                if WHOLE:
                    s0 *= whole
                    s1 *= whole
                    s2 *= whole
                    s3 *= whole
            if WIDE:
                a = (nibble(w, 0, KIND) + EIGHT) * s0[:, None]
                b = (nibble(w, 4, KIND) + EIGHT) * s1[:, None]
                c = (nibble(w, 8, KIND) + EIGHT) * s2[:, None]
                d = (nibble(w, 12, KIND) + EIGHT) * s3[:, None]
                if ZEROS > 0:
                    a -= m0[:, None]
                    b -= m1[:, None]
                    c -= m2[:, None]
                    d -= m3[:, None]
                tl.store(to + first, a.to(dtype), mask=inside)
                tl.store(to + first + S, b.to(dtype), mask=inside)
                tl.store(to + first + 2 * S, c.to(dtype), mask=inside)
                tl.store(to + first + 3 * S, d.to(dtype), mask=inside)
            else:
                a = byte(w, 0, KIND) * s0[:, None]
                b = byte(w, 8, KIND) * s2[:, None]
                if ZEROS > 0:
                    a -= m0[:, None]
                    b -= m2[:, None]
                tl.store(to + first, a.to(dtype), mask=inside)
                tl.store(to + first + S, b.to(dtype), mask=inside)


unpack: Any = triton.jit(_unpack_rows, do_not_specialize=["begin", "end", "pieces", "stride"])
