"""Scales, zeros and mins of groups of inputs, in Triton.

The number of a code is code x scale - min, of 4-bit integers (code - 8) x scale - min; zeros are
made mins. All lie in planes of 32-bit words [words, outputs]: the bits of one group after those of
the one before, lowest first. So a program's are neighbours, and every load is wide enough to be
copied ahead of its use.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.worker.backends.cuda.kernels.packed.triton_codes import INT4

# What the bits of a scale are: float32, bfloat16, float16, an exponent with bias 127, float8 e4m3.
FLOAT32, BFLOAT16, FLOAT16, EXPONENT, FLOAT8 = (tl.constexpr(kind) for kind in range(5))


@triton.jit
def _word(plane, bit, stride, there):  # type: ignore[no-untyped-def]
    return tl.load(plane + (bit // 32) * stride, mask=there, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _group_bits(  # type: ignore[no-untyped-def]
    plane, first, stride, there, GROUP: tl.constexpr, S: tl.constexpr, BITS: tl.constexpr
):
    """The bits of the groups of inputs `first`, `first` + S, + 2 S and + 3 S, at the low end of
    what is returned for each."""
    bit = (first // GROUP) * BITS
    w0 = _word(plane, bit, stride, there)
    a = w0 >> (bit % 32) if BITS < 32 else w0
    b = a
    c = a
    d = a
    if GROUP == S:
        if 4 * BITS <= 32:
            b = a >> BITS
            c = a >> (2 * BITS)
            d = a >> (3 * BITS)
        elif BITS == 16:
            b = w0 >> 16
            a = w0
            c = _word(plane, bit + 32, stride, there)
            d = c >> 16
        else:
            b = _word(plane, bit + 32, stride, there)
            c = _word(plane, bit + 64, stride, there)
            d = _word(plane, bit + 96, stride, there)
    elif GROUP == 2 * S:
        c = a >> BITS if 2 * BITS <= 32 else _word(plane, bit + 32, stride, there)
        d = c
    return a, b, c, d


@triton.constexpr_function  # type: ignore[untyped-decorator]
def scale_bits(scale: int) -> int:
    """How many a scale has."""
    return {0: 32, 1: 16, 2: 16}.get(scale, 8)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_of(bits, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A scale as float32."""
    if SCALE == FLOAT32:
        return bits.to(tl.float32, bitcast=True)
    if SCALE == BFLOAT16:
        return (bits << 16).to(tl.float32, bitcast=True)
    if SCALE == FLOAT16:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    if SCALE == EXPONENT:
        field = bits & 255
        return tl.where(field == 0, 0x00400000, field << 23).to(tl.float32, bitcast=True)
    field = ((bits & 128) << 24) | ((bits & 127) << 20)
    return field.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit  # type: ignore[untyped-decorator]
def _signed(bits, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A zero."""
    return ((bits << (32 - BITS)) >> (32 - BITS)).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _six(words, AT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Six bits from bit 0, 6 or 12 on, as float32 x 2^AT: they are made the bits of a fraction."""
    bits = (words & (63 << AT)) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _six_bit_scales(steps, fields, more, there, first, stride):  # type: ignore[no-untyped-def]
    """Scales and mins of four groups of 32 (Q4_K, Q5_K), of three planes: for each 256 inputs what
    scales and mins are multiples of, two float16; for each 128 `fields`, and half a word of `more`:

        fields: bits 0, 6, 12, 18: four scales; 24: the first min; 30: the second's high bits
        more:   bits 0, 6: the third and fourth min; 12: the second's low bits
    """
    both = tl.load(steps + (first // 256) * stride, mask=there, other=0)
    step = both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    least = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    a = tl.load(fields + (first // 128) * stride, mask=there, other=0)
    b = tl.load(more + (first // 256) * stride, mask=there, other=0) >> ((first // 128) % 2 * 16)
    up = a >> 18
    second = ((a >> 26) & 48) | ((b >> 12) & 15)
    s0 = step * _six(a, 0)
    s1 = step * 0.015625 * _six(a, 6)
    s2 = step * 0.000244140625 * _six(a, 12)
    s3 = step * _six(up, 0)
    m0 = least * 0.015625 * _six(up, 6)
    m1 = least * _six(second, 0)
    m2 = least * _six(b, 0)
    m3 = least * 0.015625 * _six(b, 6)
    return s0, s1, s2, s3, m0, m1, m2, m3


@triton.jit  # type: ignore[untyped-decorator]
def group_scales(  # type: ignore[no-untyped-def]
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
):
    """Scales and mins of the groups of inputs `first`, `first` + S, + 2 S and + 3 S.

    `ZEROS`: how many bits a group's zero has; 0: there are none; 6: scales and mins are together,
    in six bits each.
    """
    EIGHT: tl.constexpr = 8.0 if KIND == INT4 else 0.0
    if ZEROS == 6:
        s0, s1, s2, s3, m0, m1, m2, m3 = _six_bit_scales(scales, zeros, more, there, first, stride)
        m0 -= EIGHT * s0
        m1 -= EIGHT * s1
        m2 -= EIGHT * s2
        m3 -= EIGHT * s3
    else:
        b0, b1, b2, b3 = _group_bits(scales, first, stride, there, GROUP, S, scale_bits(SCALE))
        s0 = _scale_of(b0, SCALE)
        s1 = _scale_of(b1, SCALE)
        s2 = _scale_of(b2, SCALE)
        s3 = _scale_of(b3, SCALE)
        m0 = s0
        m1 = s1
        m2 = s2
        m3 = s3
        if ZEROS > 0:
            z0, z1, z2, z3 = _group_bits(zeros, first, stride, there, GROUP, S, ZEROS)
            m0 *= _signed(z0, ZEROS) - EIGHT
            m1 *= _signed(z1, ZEROS) - EIGHT
            m2 *= _signed(z2, ZEROS) - EIGHT
            m3 *= _signed(z3, ZEROS) - EIGHT
    return s0, s1, s2, s3, m0, m1, m2, m3
