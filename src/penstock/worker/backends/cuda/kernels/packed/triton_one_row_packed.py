"""The product of a single row with a packed weight, in Triton, without the matrix units.

Memory is to be kept busy with few instructions per weight. A thread takes four 32-bit words of
codes of some outputs, makes each code a float32 by its bits alone and multiplies it with the input
that all its outputs share (`triton_row_codes`); sums of a group are scaled, and a program's threads
add up once, at its end.

With a norm, inputs are multiplied by its weight and the sum by the root of their mean squares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.worker.backends.cuda.kernels.packed.triton_codes import E2M1, INT4
from penstock.worker.backends.cuda.kernels.packed.triton_row_codes import (
    FROM_E2M1,
    inputs_of,
    numbers,
    offset_of,
    power,
    whole,
)
from penstock.worker.backends.cuda.kernels.packed.triton_scales import group_scales

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.worker.backends.cuda.kernels.packed.tiled import TiledWeight


@dataclass(frozen=True, slots=True)
class RowTile:
    """Of one program: outputs, and groups of four words of each at a time; warps."""

    outputs: int
    vectors: int
    warps: int


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Those of a coding, measured on an H200 with the products of an 8B model."""

    small: RowTile
    large: RowTile  # 32 Mi weights or more
    long: RowTile  # 8192 inputs or more


# The best of a sweep on an H200 over the products of an 8B model.
_FOUR_BITS = RowTiles(small=RowTile(8, 64, 2), large=RowTile(8, 64, 2), long=RowTile(4, 64, 2))
_SMALL_GROUPS = RowTiles(small=RowTile(4, 64, 2), large=RowTile(4, 64, 2), long=RowTile(4, 128, 4))
_EIGHT_BITS = RowTiles(small=RowTile(4, 128, 2), large=RowTile(2, 256, 4), long=RowTile(8, 128, 4))


def row_tile(weight: TiledWeight) -> RowTile:
    """For a weight."""
    coding, (outputs, inputs) = weight.coding, weight.shape
    tiles = _EIGHT_BITS
    if coding.codes_of_word == 4:
        tiles = _SMALL_GROUPS if 0 < coding.group < coding.span else _FOUR_BITS
    tile = tiles.large if outputs * inputs >= 32 << 20 else tiles.small
    if inputs >= 8192:
        tile = tiles.long
    vectors = min(tile.vectors, triton.next_power_of_2(inputs // (8 * coding.codes_of_word)))
    return RowTile(tile.outputs, vectors, max(1, min(tile.warps, vectors // 32)))


def multiply_row(
    row: Tensor,
    weight: TiledWeight,
    out: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    added: bool = False,
    early: bool = False,
    tile: RowTile | None = None,
) -> None:
    """As `TiledWeight.few_rows`, of one row [1, in], its inputs in the order of the codes."""
    planes = weight.planes
    outputs = out.shape[1]
    tile = tile or row_tile(weight)
    nothing = planes.codes
    _product[(triton.cdiv(outputs, tile.outputs),)](
        row,
        planes.codes,
        planes.scales if planes.scales is not None else nothing,
        planes.zeros if planes.zeros is not None else nothing,
        planes.more if planes.more is not None else nothing,
        bias if bias is not None else row,
        norm[0] if norm is not None else row,
        out,
        outputs,
        planes.codes.stride(0),
        planes.scales.stride(0) if planes.scales is not None else 0,
        norm[1] if norm is not None else 0.0,
        **weight.coding.arguments(),
        K=weight.shape[1],
        N=tile.outputs,
        V=tile.vectors,
        BIAS=bias is not None,
        NORM=norm is not None,
        GATED=gated,
        RESIDUAL=added,
        EARLY=early,
        PTX=row.is_cuda,
        num_warps=tile.warps,
        launch_pdl=early,
    )


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _group_ends(part: int, parts: int, group: int, span: int) -> bool:
    """Whether the inputs after a part of a span have another scale."""
    return part == parts - 1 or (group > 0 and (part + 1) * (span // parts) % group == 0)


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    acc,
    words,
    x,
    offset,
    total,
    scale,
    least,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    MINS: tl.constexpr,
    PTX: tl.constexpr,
):
    """The sums [vectors, outputs] and the codes times inputs."""
    PARTS: tl.constexpr = 4 if KIND <= E2M1 else 2
    f = numbers(words, KIND, PTX)
    part = offset[0]
    sum_of = total[0]
    for PART in tl.static_range(PARTS):
        part = part + f[PART][0] * x[PART][0] + f[PART][1] * x[PART][1]
        if _group_ends(PART, PARTS, GROUP, SPAN):
            s = scale[PART * (4 // PARTS)]
            acc += tl.sum(part, 2) * (s * FROM_E2M1 if KIND == E2M1 else s)
            if MINS:
                acc -= sum_of * least[PART * (4 // PARTS)]
            if PART < PARTS - 1:
                part = offset[PART + 1]
                sum_of = total[PART + 1]
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _of_groups(a, b, c, d, PARTS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each group's sum, where its first part is."""
    if not _group_ends(0, PARTS, GROUP, SPAN):
        a += b
    if PARTS == 4:
        if not _group_ends(2, PARTS, GROUP, SPAN):
            c += d
        if not _group_ends(1, PARTS, GROUP, SPAN):
            a += c
    return a, b, c, d


@triton.jit
def _flat(tile):  # type: ignore[no-untyped-def]
    """[vectors, fours, 4] as [vectors, outputs]."""
    return tl.reshape(tile, [tile.shape[0], tile.shape[1] * tile.shape[2]])


@triton.jit  # type: ignore[untyped-decorator]
def _group_scales(  # type: ignore[no-untyped-def]
    scales,
    zeros,
    more,
    there,
    first,
    stride,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """Scales and mins of a span's quarters."""
    if GROUP == 0:
        s0 = tl.full([1, 1, 1], 1.0, tl.float32)
        s1 = s0
        s2 = s0
        s3 = s0
        m0 = s0
        m1 = s0
        m2 = s0
        m3 = s0
    else:
        # Mins are those of codes as they are, not less 8.
        LIKE: tl.constexpr = E2M1 if ZEROS else KIND
        s0, s1, s2, s3, m0, m1, m2, m3 = group_scales(
            scales, zeros, more, there, first, stride, LIKE, SCALE, GROUP, SPAN // 4, ZEROS
        )
    return (_flat(s0), _flat(s1), _flat(s2), _flat(s3)), (
        _flat(m0),
        _flat(m1),
        _flat(m2),
        _flat(m3),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _six(words, PLACE: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Six bits from bit `PLACE` on, as float32."""
    return whole(words, PLACE, 6, 0, PTX) - power(PLACE)


@triton.jit  # type: ignore[untyped-decorator]
def _six_bit_step(  # type: ignore[no-untyped-def]
    acc, words, x, offset, total, steps, fields, more, inside, first, stride, PTX: tl.constexpr
):
    """As `_step`, with scales and mins in six bits each, where `triton_scales` says: what they are
    multiples of is applied to the sums of a span."""
    both = _flat(tl.load(steps + (first // 256) * stride, mask=inside, other=0))
    a = _flat(tl.load(fields + (first // 128) * stride, mask=inside, other=0))
    b = tl.load(more + (first // 256) * stride, mask=inside, other=0)
    b = _flat(b >> ((first // 128) % 2 * 16))
    step = both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    least = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    f = numbers(words, INT4, PTX)
    up = a >> 18
    second = ((a >> 26) & 48) | ((b >> 12) & 15)
    part = _six(a, 0, PTX) * tl.sum(offset[0] + f[0][0] * x[0][0] + f[0][1] * x[0][1], 2)
    part += _six(a, 6, PTX) * tl.sum(offset[1] + f[1][0] * x[1][0] + f[1][1] * x[1][1], 2)
    part += _six(a, 12, PTX) * tl.sum(offset[2] + f[2][0] * x[2][0] + f[2][1] * x[2][1], 2)
    part += _six(up, 0, PTX) * tl.sum(offset[3] + f[3][0] * x[3][0] + f[3][1] * x[3][1], 2)
    mins = _six(up, 6, PTX) * total[0] + _six(second, 0, PTX) * total[1]
    mins += _six(b, 0, PTX) * total[2] + _six(b, 6, PTX) * total[3]
    return acc + step * part - least * mins


def _product_row(  # type: ignore[no-untyped-def]
    x,
    codes,
    scales,
    zeros,
    more,
    bias,
    norm,
    out,
    outputs,  # of a program's kind: half of the weight's, if gated
    code_stride,
    stride,  # of scales, from word to word
    epsilon,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    ZEROS: tl.constexpr,
    WHOLE: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
    PTX: tl.constexpr,
):
    PARTS: tl.constexpr = 4 if KIND <= E2M1 else 2
    S: tl.constexpr = SPAN // PARTS
    WIDTH: tl.constexpr = 8 * PARTS  # inputs of a vector: four words
    VECTORS: tl.constexpr = K // WIDTH
    HALF: tl.constexpr = x.dtype.element_ty == tl.float16
    MINS: tl.constexpr = ZEROS != 0
    n = tl.program_id(0) * N + tl.arange(0, N)
    there = n < outputs
    row = tl.where(there, n, 0)
    j = tl.arange(0, 4)[None, None, :]
    v = tl.arange(0, V)
    words = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    at = words + row.to(tl.int64)[None, :, None] * (code_stride // 2) + 4 * v[:, None, None] + j
    up_at = at + outputs.to(tl.int64) * (code_stride // 2)
    pairs = x.to(tl.pointer_type(tl.int32), bitcast=True)
    norm_pairs = norm.to(tl.pointer_type(tl.int32), bitcast=True)
    # Of four neighbours at a time, as codes are: a thread takes those of all its outputs.
    FOUR: tl.constexpr = min(4, N)
    fours = tl.arange(0, N // FOUR)[None, :, None] * FOUR + tl.arange(0, FOUR)[None, None, :]
    fours += tl.program_id(0) * N
    scale_at = scales + fours
    up_scale_at = scale_at + outputs
    if BLOCK > 1:
        scale_at = scales + tl.full([1, 1, 1], 0, tl.int32) + (tl.program_id(0) * N) // BLOCK
        up_scale_at = scale_at + outputs // BLOCK
    zero_at = zeros + fours
    more_at = more + fours
    # Codes and scales do not depend on the kernel before: the first are asked for at once.
    w = tl.load(at, mask=(v < VECTORS)[:, None, None], other=0)
    u = w
    if GATED:
        u = tl.load(up_at, mask=(v < VECTORS)[:, None, None], other=0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    squares = tl.zeros([V, 1, 4], tl.float32)
    acc = tl.zeros([V, N], tl.float32)
    up = tl.zeros([V, N], tl.float32)
    TIMES: tl.constexpr = 2 if V < VECTORS and VECTORS <= 2 * V else 1
    for start in tl.range(0, VECTORS, TIMES * V):
        for time in tl.static_range(TIMES):
            first = start + time * V
            vector = first + v
            codes_now = w
            up_now = u
            if V < VECTORS:
                left = (vector + V < VECTORS)[:, None, None]
                w = tl.load(at + 4 * (first + V), mask=left, other=0)
                if GATED:
                    u = tl.load(up_at + 4 * (first + V), mask=left, other=0)
            x_there = (vector < VECTORS)[:, None, None]
            inside = x_there
            if BLOCK == 1:
                inside = x_there & (fours < outputs)
            span = (vector // (S // 8) * SPAN)[:, None, None]
            pair = span // 2 + 4 * (vector % (S // 8))[:, None, None] + j
            x_at = pairs + pair
            g_at = norm_pairs + pair
            x0, squares = inputs_of(x_at, g_at, squares, x_there, KIND, NORM, HALF)
            x1, squares = inputs_of(
                x_at + S // 2, g_at + S // 2, squares, x_there, KIND, NORM, HALF
            )
            x2 = x0
            x3 = x1
            if PARTS == 4:
                x2, squares = inputs_of(x_at + S, g_at + S, squares, x_there, KIND, NORM, HALF)
                x3, squares = inputs_of(
                    x_at + 3 * S // 2, g_at + 3 * S // 2, squares, x_there, KIND, NORM, HALF
                )
            offset = _of_groups(
                offset_of(x0, 0, KIND, MINS),
                offset_of(x1, 1, KIND, MINS),
                offset_of(x2, 2 % PARTS, KIND, MINS),
                offset_of(x3, 3 if PARTS == 4 else 1, KIND, MINS),
                PARTS, GROUP, SPAN,
            )  # fmt: skip
            total = _of_groups(
                tl.sum(x0[0] + x0[1], 2),
                tl.sum(x1[0] + x1[1], 2),
                tl.sum(x2[0] + x2[1], 2),
                tl.sum(x3[0] + x3[1], 2),
                PARTS, GROUP, SPAN,
            )  # fmt: skip
            xs = (x0, x1, x2, x3)
            if ZEROS == 6:
                acc = _six_bit_step(acc, codes_now, xs, offset, total, scale_at, zero_at, more_at,
                                    inside, span, stride, PTX)  # fmt: skip
            else:
                s, m = _group_scales(scale_at, zero_at, more_at, inside, span, stride,
                                     KIND, SCALE, GROUP, SPAN, ZEROS)  # fmt: skip
                acc = _step(acc, codes_now, xs, offset, total, s, m,
                            KIND, GROUP, SPAN, MINS, PTX)  # fmt: skip
            if GATED and ZEROS == 6:
                up = _six_bit_step(up, up_now, xs, offset, total, up_scale_at, zero_at + outputs,
                                   more_at + outputs, inside, span, stride, PTX)  # fmt: skip
            elif GATED:
                s, m = _group_scales(up_scale_at, zero_at + outputs, more_at + outputs, inside,
                                     span, stride, KIND, SCALE, GROUP, SPAN, ZEROS)  # fmt: skip
                up = _step(up, up_now, xs, offset, total, s, m,
                           KIND, GROUP, SPAN, MINS, PTX)  # fmt: skip
    y = tl.sum(acc, 0)
    z = y
    if GATED:
        z = tl.sum(up, 0)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(tl.reshape(squares, [4 * V]), 0) / K + epsilon)
        y *= factor
        z *= factor
    if WHOLE:
        y *= tl.load(more + n, mask=there, other=0).to(tl.float32, bitcast=True)
        if GATED:
            z *= tl.load(more + n + outputs, mask=there, other=0).to(tl.float32, bitcast=True)
    if BIAS:
        y += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * z
    if RESIDUAL:
        y += tl.load(out + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=there)


_product: Any = triton.jit(_product_row)
