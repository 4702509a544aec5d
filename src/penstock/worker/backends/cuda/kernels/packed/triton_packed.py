"""Products with packed weights, in Triton: codes are read once and become numbers in registers.

Rows of the weight are the first operand of the matrix units, which take it from registers; the
rows that come are the second. Exact codes are multiplied and the sums of a group scaled in float32,
or weights are scaled first and rounded like de-quantised ones (for many rows, where scaling sums
would cost more).

The inputs of small weights are cut into parts, programs of their own. What cuts there are is a
property of the weight, and the last program of a tile to arrive adds up the parts in their order:
results do not depend on who was first.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.worker.backends.cuda.kernels.packed.triton_codes import E2M1, halves, quarters
from penstock.worker.backends.cuda.kernels.packed.triton_scales import group_scales

_PREFETCH: Any = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;")


@triton.jit  # type: ignore[untyped-decorator]
def _add(acc, part, total, s, m, MINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums and those of a group of codes, scaled; less the sum of the inputs times the min."""
    acc += part * s[:, None]
    if MINS:
        acc -= total * m[:, None]
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(w, s, m, MINS: tl.constexpr):  # type: ignore[no-untyped-def]
    x = w.to(tl.float32) * s[:, None]
    if MINS:
        x -= m[:, None]
    return x.to(w.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _quarters_step(  # type: ignore[no-untyped-def]
    acc,
    words,
    x0,
    x1,
    x2,
    x3,
    scales,
    zeros,
    more,
    there,
    first,
    stride,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    S: tl.constexpr,
    ZEROS: tl.constexpr,
    FIRST: tl.constexpr,
    PTX: tl.constexpr,
):
    """The sums [n, rows] and a span of 4-bit codes times inputs from `first` on."""
    a, b, c, d = quarters(words, KIND, x0.dtype, PTX)
    MINS: tl.constexpr = ZEROS != 0
    s0, s1, s2, s3, m0, m1, m2, m3 = group_scales(
        scales, zeros, more, there, first, stride, KIND, SCALE, GROUP, S, ZEROS
    )
    if FIRST:
        acc = tl.dot(_scaled(a, s0, m0, MINS), x0, acc)
        acc = tl.dot(_scaled(b, s1, m1, MINS), x1, acc)
        acc = tl.dot(_scaled(c, s2, m2, MINS), x2, acc)
        return tl.dot(_scaled(d, s3, m3, MINS), x3, acc)
    # Sums of inputs are where sums of codes are when the matrix units make them as well.
    ones = tl.full(a.shape, 1.0, x0.dtype)
    part = tl.dot(a, x0)
    total = tl.dot(ones, x0) if MINS else part
    if GROUP < 2 * S:
        acc = _add(acc, part, total, s0, m0, MINS)
        part = tl.dot(b, x1)
        total = tl.dot(ones, x1) if MINS else part
    else:
        part = tl.dot(b, x1, part)
        total = tl.dot(ones, x1, total) if MINS else part
    if GROUP < 4 * S:
        acc = _add(acc, part, total, s1, m1, MINS)
        part = tl.dot(c, x2)
        total = tl.dot(ones, x2) if MINS else part
    else:
        part = tl.dot(c, x2, part)
        total = tl.dot(ones, x2, total) if MINS else part
    if GROUP < 2 * S:
        acc = _add(acc, part, total, s2, m2, MINS)
        part = tl.dot(d, x3)
        total = tl.dot(ones, x3) if MINS else part
    else:
        part = tl.dot(d, x3, part)
        total = tl.dot(ones, x3, total) if MINS else part
    return _add(acc, part, total, s3, m3, MINS)


@triton.jit  # type: ignore[untyped-decorator]
def _halves_step(  # type: ignore[no-untyped-def]
    acc,
    words,
    x0,
    x1,
    scales,
    zeros,
    more,
    there,
    first,
    stride,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    S: tl.constexpr,
    ZEROS: tl.constexpr,
    FIRST: tl.constexpr,
    PTX: tl.constexpr,
):
    """The same of 8-bit codes."""
    a, b = halves(words, KIND, x0.dtype, PTX)
    MINS: tl.constexpr = ZEROS != 0
    # A span of two parts is one of four, halved.
    s0, _s1, s2, _s3, m0, _m1, m2, _m3 = group_scales(
        scales, zeros, more, there, first, stride, KIND, SCALE, GROUP, S // 2, ZEROS
    )
    if FIRST:
        acc = tl.dot(_scaled(a, s0, m0, MINS), x0, acc)
        return tl.dot(_scaled(b, s2, m2, MINS), x1, acc)
    ones = tl.full(a.shape, 1.0, x0.dtype)
    part = tl.dot(a, x0)
    total = tl.dot(ones, x0) if MINS else part
    if GROUP < 2 * S:
        acc = _add(acc, part, total, s0, m0, MINS)
        part = tl.dot(b, x1)
        total = tl.dot(ones, x1) if MINS else part
    else:
        part = tl.dot(b, x1, part)
        total = tl.dot(ones, x1, total) if MINS else part
    return _add(acc, part, total, s2, m2, MINS)


@triton.jit  # type: ignore[untyped-decorator]
def _ungrouped_quarters(acc, words, x0, x1, x2, x3, KIND: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums and a span of 4-bit codes times inputs, where outputs have one scale each."""
    a, b, c, d = quarters(words, KIND, x0.dtype, PTX)
    acc = tl.dot(b, x1, tl.dot(a, x0, acc))
    return tl.dot(d, x3, tl.dot(c, x2, acc))


@triton.jit  # type: ignore[untyped-decorator]
def _ungrouped_halves(acc, words, x0, x1, KIND: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same of 8-bit codes."""
    a, b = halves(words, KIND, x0.dtype, PTX)
    return tl.dot(b, x1, tl.dot(a, x0, acc))


@triton.jit  # type: ignore[untyped-decorator]
def _rows_tile(  # type: ignore[no-untyped-def]
    at, norm, first, factor, inside, S: tl.constexpr, NORM: tl.constexpr
):
    """Inputs [S, rows] from `first` on."""
    x = tl.load(at + first, mask=inside, other=0.0)
    if NORM:
        g = tl.load(norm + first + tl.arange(0, S)).to(tl.float32)
        x = (x.to(tl.float32) * factor * g[:, None]).to(x.dtype)
    return x


def _product_rows(  # type: ignore[no-untyped-def]
    x,
    codes,
    scales,
    zeros,
    more,
    bias,
    norm,
    out,
    sums,
    arrivals,
    rows,
    outputs,  # of a program's kind: half of the weight's, if gated
    pieces,  # spans of inputs
    cuts,
    code_stride,  # words of an output
    x_stride,
    out_stride,
    stride,  # of scales, from group to group
    epsilon,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,  # 0: one scale for each output
    SPAN: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    KP: tl.constexpr,  # of a row that is normed
    STAGES: tl.constexpr,
    ZEROS: tl.constexpr,  # bits of a group's zero, as `triton_scales` says
    WHOLE: tl.constexpr,  # whether `more` has a number for each output
    BLOCK: tl.constexpr,  # outputs that share a scale
    FIRST: tl.constexpr,  # weights are scaled, not sums
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
    PTX: tl.constexpr,
):
    WIDE: tl.constexpr = KIND <= E2M1  # four codes to a word
    S: tl.constexpr = SPAN // (4 if WIDE else 2)
    n = tl.program_id(0) * N + tl.arange(0, N)
    there = n < outputs
    begin = (tl.program_id(1) * pieces) // cuts
    end = ((tl.program_id(1) + 1) * pieces) // cuts
    j = tl.arange(0, S)
    m = tl.arange(0, M)
    at = codes + n.to(tl.int64)[:, None] * code_stride + j[None, :]
    up_at = at + outputs.to(tl.int64) * code_stride
    if EARLY:
        gdc_launch_dependents()
        if PTX:
            # Codes do not depend on the kernel before: they are on their way while it ends.
            size = tl.full([N], 0, tl.int32) + (end - begin) * (2 * S)
            ahead = codes + tl.minimum(n, outputs - 1).to(tl.int64) * code_stride + begin * S
            tl.inline_asm_elementwise(_PREFETCH, "=r,l,r", [ahead, size], tl.int32, False, 1)
            if GATED:
                ahead += outputs.to(tl.int64) * code_stride
                tl.inline_asm_elementwise(_PREFETCH, "=r,l,r", [ahead, size], tl.int32, False, 1)
        gdc_wait()
    inside = (m < rows)[None, :]
    x_at = x + m.to(tl.int64)[None, :] * x_stride + j[:, None]
    factor = 1.0
    if NORM:
        whole = tl.arange(0, KP)
        row = tl.load(x + whole, mask=whole < pieces * SPAN, other=0.0).to(tl.float32)
        factor = 1.0 / tl.sqrt(tl.sum(row * row, 0) / (pieces * SPAN) + epsilon)
    scale_at = scales + n // BLOCK
    if BLOCK > 1:
        scale_at = scales + tl.full([N], 0, tl.int32) + (tl.program_id(0) * N) // BLOCK
    zero_at = zeros + n
    more_at = more + n
    acc = tl.zeros([N, M], tl.float32)
    up = tl.zeros([N, M], tl.float32)
    for piece in tl.range(begin, end, num_stages=STAGES):
        first = piece * SPAN
        w = tl.load(at + piece * S, mask=there[:, None], other=0)
        if GATED:
            u = tl.load(up_at + piece * S, mask=there[:, None], other=0)
        x0 = _rows_tile(x_at, norm, first, factor, inside, S, NORM)
        x1 = _rows_tile(x_at, norm, first + S, factor, inside, S, NORM)
        if WIDE:
            x2 = _rows_tile(x_at, norm, first + 2 * S, factor, inside, S, NORM)
            x3 = _rows_tile(x_at, norm, first + 3 * S, factor, inside, S, NORM)
            if GROUP == 0:
                acc = _ungrouped_quarters(acc, w, x0, x1, x2, x3, KIND, PTX)
                if GATED:
                    up = _ungrouped_quarters(up, u, x0, x1, x2, x3, KIND, PTX)
            else:
                acc = _quarters_step(
                    acc, w, x0, x1, x2, x3, scale_at, zero_at, more_at, there, first, stride,
                    KIND, SCALE, GROUP, S, ZEROS, FIRST, PTX,
                )  # fmt: skip
                if GATED:
                    up = _quarters_step(
                        up, u, x0, x1, x2, x3, scale_at + outputs, zero_at + outputs,
                        more_at + outputs, there, first, stride,
                        KIND, SCALE, GROUP, S, ZEROS, FIRST, PTX,
                    )  # fmt: skip
        elif GROUP == 0:
            acc = _ungrouped_halves(acc, w, x0, x1, KIND, PTX)
            if GATED:
                up = _ungrouped_halves(up, u, x0, x1, KIND, PTX)
        else:
            acc = _halves_step(
                acc, w, x0, x1, scale_at, zero_at, more_at, there, first, stride,
                KIND, SCALE, GROUP, S, ZEROS, FIRST, PTX,
            )  # fmt: skip
            if GATED:
                up = _halves_step(
                    up, u, x0, x1, scale_at + outputs // BLOCK, zero_at + outputs,
                    more_at + outputs, there, first, stride,
                    KIND, SCALE, GROUP, S, ZEROS, FIRST, PTX,
                )  # fmt: skip
    last = True
    if cuts > 1:
        KINDS: tl.constexpr = 2 if GATED else 1
        place = tl.arange(0, N)[:, None] * M + m[None, :]
        tile = tl.program_id(0) * cuts
        own = sums + (tile + tl.program_id(1)) * (KINDS * N * M) + place
        tl.store(own, acc)
        if GATED:
            tl.store(own + N * M, up)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tl.program_id(0), 1, sem="acq_rel")
        last = arrived == cuts - 1
        if last:
            tl.debug_barrier()
            acc = tl.zeros([N, M], tl.float32)
            up = tl.zeros([N, M], tl.float32)
            for cut in range(cuts):
                # Past the first-level cache, which may hold what stood there before.
                from_place = sums + (tile + cut) * (KINDS * N * M) + place
                acc += tl.load(from_place, cache_modifier=".cg")
                if GATED:
                    up += tl.load(from_place + N * M, cache_modifier=".cg")
            tl.store(arrivals + tl.program_id(0), 0)
    if last:
        if WHOLE:
            s = tl.load(more_at, mask=there, other=0).to(tl.float32, bitcast=True)
            acc *= s[:, None]
            if GATED:
                s = tl.load(more_at + outputs, mask=there, other=0).to(tl.float32, bitcast=True)
                up *= s[:, None]
        if BIAS:
            acc += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        to = out + m.to(tl.int64)[None, :] * out_stride + n[:, None]
        stored = there[:, None] & inside
        if RESIDUAL:
            acc += tl.load(to, mask=stored, other=0.0).to(tl.float32)
        tl.store(to, acc.to(out.dtype.element_ty), mask=stored)


product: Any = triton.jit(_product_rows, do_not_specialize=["rows", "pieces", "cuts", "stride"])
