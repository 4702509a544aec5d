"""Codes and inputs of a product of one row as float32, in Triton.

An integer code is put into the fraction of a float32, which makes it a power of two plus the code;
the sum of the inputs times these powers, `offset`, is the same for all outputs.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.worker.backends.cuda.kernels.packed.triton_codes import E2M1, INT4, INT8

_E4M3_PTX: Any = tl.constexpr(
    """{ .reg .b16 a, b, c, d, e, f; .reg .b32 m, n;
    mov.b32 {a, b}, $4; cvt.rn.f16x2.e4m3x2 m, a; cvt.rn.f16x2.e4m3x2 n, b;
    mov.b32 {c, d}, m; mov.b32 {e, f}, n;
    cvt.f32.f16 $0, c; cvt.f32.f16 $1, d; cvt.f32.f16 $2, e; cvt.f32.f16 $3, f; }"""
)
_TO_E2M1: Any = tl.constexpr(2.0**100)  # of inputs: products of such small codes stay normal
FROM_E2M1: Any = tl.constexpr(2.0**26)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def power(place: int) -> float:
    """What a float32 is whose fraction counts whole numbers from bit `place` on."""
    return float(1 << (23 - place))


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _field_ptx(place: int, bits: int, flip: int) -> str:
    """In one instruction; of plain operations with two constants the compiler makes two."""
    one = ((150 - place) << 23) | (flip << (place + bits - 1))
    return f"lop3.b32 $0, $1, {((1 << bits) - 1) << place}, {one}, 0x6A;"


@triton.jit  # type: ignore[untyped-decorator]
def whole(  # type: ignore[no-untyped-def]
    words, PLACE: tl.constexpr, BITS: tl.constexpr, FLIP: tl.constexpr, PTX: tl.constexpr
):
    """`power(PLACE)` plus the code there, its highest bit turned if `FLIP`."""
    if PTX:
        PTX_LINE: tl.constexpr = _field_ptx(PLACE, BITS, FLIP)
        bits = tl.inline_asm_elementwise(PTX_LINE, "=r,r", [words], tl.int32, True, 1)
    else:
        MASK: tl.constexpr = ((1 << BITS) - 1) << PLACE
        ONE: tl.constexpr = ((150 - PLACE) << 23) | (FLIP << (PLACE + BITS - 1))
        bits = (words & MASK) ^ ONE
    return bits.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _e2m1_pair(words, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Part `PART` of both halves of the words, times 2^-126."""
    if PART == 0:
        body = words << 6
    elif PART == 1:
        body = words << 2
    else:
        body = words >> (4 * PART - 6)
    sign = words << (12 - 4 * PART)
    both = (body & 0x01C001C0) | (sign & -0x7FFF8000)
    low = (both << 16).to(tl.float32, bitcast=True)
    return low, (both & -0x10000).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _e4m3(words, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The four bytes as numbers, lowest first."""
    if PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            _E4M3_PTX,
            "=f,=f,=f,=f,r",
            [words],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            True,
            1,
        )
    else:
        a = _e4m3_byte(words)
        b = _e4m3_byte(words >> 8)
        c = _e4m3_byte(words >> 16)
        d = _e4m3_byte(words >> 24)
    return a, b, c, d


@triton.jit
def _e4m3_byte(words):  # type: ignore[no-untyped-def]
    bits = ((words & 128) << 24) | ((words & 127) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit  # type: ignore[untyped-decorator]
def numbers(words, KIND: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes in tiles of words, as float32: of each part those of the low and the high half.
    Parts that there are not repeat others."""
    if KIND == INT4:
        low = words << 11
        high = words >> 9
        return (
            (whole(low, 11, 4, 0, PTX), whole(words, 16, 4, 0, PTX)),
            (whole(low, 15, 4, 0, PTX), whole(high, 11, 4, 0, PTX)),
            (whole(low, 19, 4, 0, PTX), whole(high, 15, 4, 0, PTX)),
            (whole(words, 12, 4, 0, PTX), whole(high, 19, 4, 0, PTX)),
        )
    if KIND == E2M1:
        return (
            _e2m1_pair(words, 0),
            _e2m1_pair(words, 1),
            _e2m1_pair(words, 2),
            _e2m1_pair(words, 3),
        )
    if KIND == INT8:
        low = words << 7
        high = words >> 9
        a = (whole(low, 7, 8, 1, PTX), whole(high, 7, 8, 1, PTX))
        b = (whole(low, 15, 8, 1, PTX), whole(high, 15, 8, 1, PTX))
        return a, b, a, b
    a, b, c, d = _e4m3(words, PTX)
    return (a, c), (b, d), (a, c), (b, d)


@triton.jit  # type: ignore[untyped-decorator]
def offset_of(x, PART: tl.constexpr, KIND: tl.constexpr, MINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Less what a part's sum has above that of the codes' values."""
    a, b = x
    if KIND == INT4:
        EIGHT: tl.constexpr = 0.0 if MINS else 8.0
        LOW: tl.constexpr = power((11, 15, 19, 12)[PART]) + EIGHT
        HIGH: tl.constexpr = power((16, 11, 15, 19)[PART]) + EIGHT
        return -LOW * a - HIGH * b
    if KIND == INT8:
        BOTH: tl.constexpr = power((7, 15)[PART]) + 128.0
        return -BOTH * (a + b)
    return tl.zeros_like(a)


@triton.jit  # type: ignore[untyped-decorator]
def _input_pair(at, inside, KIND: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two inputs of each word, as float32."""
    words = tl.load(at, mask=inside, other=0)
    if HALF:
        low = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -0x10000).to(tl.float32, bitcast=True)
    return low, high


@triton.jit  # type: ignore[untyped-decorator]
def inputs_of(  # type: ignore[no-untyped-def]
    x, norm, squares, inside, KIND: tl.constexpr, NORM: tl.constexpr, HALF: tl.constexpr
):
    """A part's inputs [vectors, 1, 4], low and high; `squares` and theirs."""
    a, b = _input_pair(x, inside, KIND, HALF)
    if NORM:
        squares += a * a + b * b
        c, d = _input_pair(norm, inside, KIND, HALF)
        a *= c
        b *= d
    if KIND == E2M1:
        a *= _TO_E2M1
        b *= _TO_E2M1
    return (a, b), squares
