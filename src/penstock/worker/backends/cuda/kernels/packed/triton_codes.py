"""Codes of packed weights as numbers in registers, in Triton.

Codes of four bits lie in 16-bit words: word j of a span of 4 x S inputs has those of inputs j,
j + S, j + 2 S and j + 3 S, lowest bits first. So the four parts of a tile of words are tiles of
weights of S neighbouring inputs each, and the two words that a thread has side by side give two
neighbours of each part with a mask and a shift. Likewise codes of eight bits: those of inputs j and
j + S in a word.

Numbers are exact: small integers and float8 codes fit bfloat16 and float16. Inline PTX works on
two weights at a time; the same in plain operations is for the interpreter, which has no PTX.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# Kinds of codes, as compile-time arguments.
INT4, E2M1, E4M3, INT8 = (tl.constexpr(kind) for kind in range(4))


def _block(names: str, *lines: str) -> Any:
    return tl.constexpr("{ .reg .b32 " + names + "; " + "\n".join(lines) + " }")


def _int4(kind: str, one: str, less: str) -> Any:
    """128 or 1024 plus the code, by its bits alone, less that and 8."""
    lines = [f"mov.b32 m, {one}; mov.b32 f, {less};"]
    for part in range(4):
        source = "t" if part else "$4"
        shift = f"shr.u32 t, $4, {4 * part};" if part else ""
        lines.append(f"{shift} lop3.b32 a, {source}, 0x000F000F, m, 0xEA;")
        lines.append(f"sub.rn.{kind} ${part}, a, f;")
    return _block("t, a, m, f", *lines)


def _e2m1(kind: str, low: int, factor: str) -> Any:
    """Sign, exponent and fraction where the type has them, times what makes up for its bias."""
    lines, mask = [f"mov.b32 f, {factor};"], f"0x{7 << low:04X}{7 << low:04X}"
    for part in range(4):
        by = low - 4 * part
        lines.append(f"shl.b32 a, $4, {by};" if by >= 0 else f"shr.u32 a, $4, {-by};")
        lines.append(f"and.b32 a, a, {mask}; shl.b32 t, $4, {12 - 4 * part};")
        lines.append(f"lop3.b32 a, t, 0x80008000, a, 0xEA; mul.rn.{kind} ${part}, a, f;")
    return _block("t, a, f", *lines)


def _e4m3(kind: str, low: int, factor: str) -> Any:
    """The same of the two bytes."""
    lines, mask = [f"mov.b32 f, {factor};"], f"0x{127 << low:04X}{127 << low:04X}"
    for part in range(2):
        by = low - 8 * part
        lines.append(f"shl.b32 a, $2, {by};" if by >= 0 else f"shr.u32 a, $2, {-by};")
        lines.append(f"and.b32 a, a, {mask}; shl.b32 t, $2, {8 - 8 * part};")
        lines.append(f"lop3.b32 a, t, 0x80008000, a, 0xEA; mul.rn.{kind} ${part}, a, f;")
    return _block("t, a, f", *lines)


def _int8() -> Any:
    """128 plus the low seven bits, less 128, or 256 if the sign is set."""
    lines = ["mov.b32 m, 0x43004300;"]
    for part in range(2):
        lines.append(f"shr.u32 s, $2, {8 * part};")
        lines.append("lop3.b32 a, s, 0x007F007F, m, 0xEA; lop3.b32 t, s, 0x00800080, m, 0xEA;")
        lines.append(f"sub.rn.bf16x2 ${part}, a, t;")
    return _block("s, t, a, m", *lines)


_INT4_BF16 = _int4("bf16x2", "0x43004300", "0x43084308")
_INT4_F16 = _int4("f16x2", "0x64006400", "0x64086408")
_E2M1_BF16 = _e2m1("bf16x2", 6, "0x7E807E80")
_E2M1_F16 = _e2m1("f16x2", 9, "0x74007400")
_E4M3_BF16 = _e4m3("bf16x2", 4, "0x7B807B80")
_E4M3_F16 = _e4m3("f16x2", 7, "0x5C005C00")
_INT8_BF16 = _int8()
_QUARTERS: Any = tl.constexpr("=r,=r,=r,=r,r")
_HALVES: Any = tl.constexpr("=r,=r,r")


@triton.jit  # type: ignore[untyped-decorator]
def quarters(words, KIND: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The four parts of a tile of words: int4 less 8, e2m1."""
    if PTX and tl.float16 == DTYPE:
        a, b, c, d = tl.inline_asm_elementwise(
            _E2M1_F16 if KIND == E2M1 else _INT4_F16,
            _QUARTERS,
            [words],
            (tl.float16, tl.float16, tl.float16, tl.float16),
            True,
            2,
        )
    elif PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            _E2M1_BF16 if KIND == E2M1 else _INT4_BF16,
            _QUARTERS,
            [words],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            True,
            2,
        )
    else:
        a = nibble(words, 0, KIND).to(DTYPE)
        b = nibble(words, 4, KIND).to(DTYPE)
        c = nibble(words, 8, KIND).to(DTYPE)
        d = nibble(words, 12, KIND).to(DTYPE)
    return a, b, c, d


@triton.jit  # type: ignore[untyped-decorator]
def nibble(words, SHIFT: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """One part of a tile of words, as float32."""
    code = (words.to(tl.int32) >> SHIFT) & 15
    if KIND == E2M1:
        # Sign, exponent and fraction where float32 has them; 126 is the difference of the biases.
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    return (code - 8).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def halves(words, KIND: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two parts of a tile of words of 8-bit codes."""
    if PTX and tl.bfloat16 == DTYPE and KIND == INT8:
        a, b = tl.inline_asm_elementwise(
            _INT8_BF16, _HALVES, [words], (tl.bfloat16, tl.bfloat16), True, 2
        )
    elif PTX and tl.bfloat16 == DTYPE:
        a, b = tl.inline_asm_elementwise(
            _E4M3_BF16, _HALVES, [words], (tl.bfloat16, tl.bfloat16), True, 2
        )
    elif PTX and KIND == E4M3:
        a, b = tl.inline_asm_elementwise(
            _E4M3_F16, _HALVES, [words], (tl.float16, tl.float16), True, 2
        )
    else:
        a = byte(words, 0, KIND).to(DTYPE)
        b = byte(words, 8, KIND).to(DTYPE)
    return a, b


@triton.jit  # type: ignore[untyped-decorator]
def byte(words, SHIFT: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """One part of a tile of words of 8-bit codes, as float32."""
    code = (words.to(tl.int32) >> SHIFT) & 255
    if KIND == INT8:
        return ((code ^ 128) - 128).to(tl.float32)
    bits = ((code & 128) << 24) | ((code & 127) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
