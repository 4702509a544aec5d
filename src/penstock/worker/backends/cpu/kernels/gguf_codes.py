"""Codes of GGUF blocks in registers. Compiled by Numba.

Each type has two functions: one gives 32 neighbouring weights of a row as two vectors, the other
adds the products of a block with a row's inputs to sums. The loops around them are compiled for
each type.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.extending import overload

from penstock.worker.backends.cpu.kernels.loops import OPTIONS
from penstock.worker.backends.cpu.kernels.vectors import (
    added,
    bits_of,
    either,
    less,
    load_bytes,
    load_floats,
    load_half,
    load_signed,
    load_word,
    masked,
    plus,
    shifted_left,
    shifted_right,
    splat,
    times,
    times_add,
    to_floats,
)

# By GGUF's own numbers of the types.
Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, Q5_K, Q6_K = 2, 3, 6, 8, 12, 13, 14
KINDS = {"Q4_0": Q4_0, "Q4_1": Q4_1, "Q5_0": Q5_0, "Q8_0": Q8_0}
KINDS |= {"Q4_K": Q4_K, "Q5_K": Q5_K, "Q6_K": Q6_K}
# What a number is must not depend on the loop around it: no product is fused with a sum.
_JIT: dict[str, Any] = {"error_model": "numpy", "nogil": True, "fastmath": False}
EXACT: dict[str, Any] = {**_JIT, "cache": True}


# Products of codes are rounded as it comes.
_SUMS: dict[str, Any] = {name: value for name, value in OPTIONS.items() if name != "cache"}


def _inner(function: Any) -> Any:
    return numba.njit(function, **EXACT)


def _sums(function: Any) -> Any:
    return numba.njit(function, **OPTIONS)


@_inner
def _low(codes):  # type: ignore[no-untyped-def]
    return masked(codes, np.int32(15))


@_inner
def _high(codes):  # type: ignore[no-untyped-def]
    return shifted_right(codes, np.int32(4))


def _q4_0(kind, codes, row, step):  # type: ignore[no-untyped-def]
    at = row + step * 18
    scale, packed = splat(load_half(codes, at)), load_bytes(codes, at + 2)
    less_eight = np.int32(-8)
    return (
        times(scale, to_floats(plus(_low(packed), less_eight))),
        times(scale, to_floats(plus(_high(packed), less_eight))),
    )


def _q4_1(kind, codes, row, step):  # type: ignore[no-untyped-def]
    at = row + step * 20
    scale, least = splat(load_half(codes, at)), splat(load_half(codes, at + 2))
    packed = load_bytes(codes, at + 4)
    return (
        added(times(scale, to_floats(_low(packed))), least),
        added(times(scale, to_floats(_high(packed))), least),
    )


@_inner
def _five_bits(codes, at):  # type: ignore[no-untyped-def]
    """32 codes, of four bytes with their highest bits and 16 with the others."""
    packed = load_bytes(codes, at + 4)
    first = np.int32(codes[at]) | (np.int32(codes[at + 1]) << np.int32(8))
    second = np.int32(codes[at + 2]) | (np.int32(codes[at + 3]) << np.int32(8))
    four = np.int32(4)
    low = either(_low(packed), shifted_left(bits_of(first), four))
    return low, either(_high(packed), shifted_left(bits_of(second), four))


def _q5_0(kind, codes, row, step):  # type: ignore[no-untyped-def]
    at = row + step * 22
    scale, less_sixteen = splat(load_half(codes, at)), np.int32(-16)
    low, high = _five_bits(codes, at + 2)
    return (
        times(scale, to_floats(plus(low, less_sixteen))),
        times(scale, to_floats(plus(high, less_sixteen))),
    )


def _q8_0(kind, codes, row, step):  # type: ignore[no-untyped-def]
    at = row + step * 34
    scale = splat(load_half(codes, at))
    return (
        times(to_floats(load_signed(codes, at + 2)), scale),
        times(to_floats(load_signed(codes, at + 18)), scale),
    )


@_inner
def _six_bits(codes, at, part):  # type: ignore[no-untyped-def]
    """Scale and min of one of eight parts, of twelve bytes."""
    if part < 4:
        return codes[at + part] & 63, codes[at + part + 4] & 63
    both = codes[at + part + 4]
    scale = (both & 15) | ((codes[at + part - 4] >> 6) << 4)
    return scale, (both >> 4) | ((codes[at + part] >> 6) << 4)


@_inner
def _q4_k_codes(codes, row, step):  # type: ignore[no-untyped-def]
    """32 codes, the step between them and what is taken off."""
    at, part = row + (step // 8) * 144, step % 8
    six, other = _six_bits(codes, at + 4, part)
    scale = np.float32(load_half(codes, at) * np.float32(six))
    least = np.float32(load_half(codes, at + 2) * np.float32(other))
    place, shift = at + 16 + 32 * (part // 2), np.int32(4 * (part % 2))
    first = _low(shifted_right(load_bytes(codes, place), shift))
    second = _low(shifted_right(load_bytes(codes, place + 16), shift))
    return first, second, scale, least


def _q4_k(kind, codes, row, step):  # type: ignore[no-untyped-def]
    first, second, scale, least = _q4_k_codes(codes, row, step)
    steps, mins = splat(scale), splat(least)
    return (
        less(times(steps, to_floats(first)), mins),
        less(times(steps, to_floats(second)), mins),
    )


@_inner
def _fives(codes, place, fifths, part):  # type: ignore[no-untyped-def]
    """32 codes of four bits and a fifth."""
    shift, one, four, bit = np.int32(4 * (part % 2)), np.int32(1), np.int32(4), np.int32(part)
    first = _low(shifted_right(load_bytes(codes, place), shift))
    second = _low(shifted_right(load_bytes(codes, place + 16), shift))
    first = either(first, shifted_left(masked(shifted_right(fifths[0], bit), one), four))
    second = either(second, shifted_left(masked(shifted_right(fifths[1], bit), one), four))
    return first, second


@_inner
def _q5_k_codes(codes, row, step):  # type: ignore[no-untyped-def]
    """32 codes, the step between them and what is taken off."""
    at, part = row + (step // 8) * 176, step % 8
    six, other = _six_bits(codes, at + 4, part)
    scale = np.float32(load_half(codes, at) * np.float32(six))
    least = np.float32(load_half(codes, at + 2) * np.float32(other))
    fifths = load_bytes(codes, at + 16), load_bytes(codes, at + 32)
    return _fives(codes, at + 48 + 32 * (part // 2), fifths, part), scale, least


def _q5_k(kind, codes, row, step):  # type: ignore[no-untyped-def]
    (first, second), scale, least = _q5_k_codes(codes, row, step)
    steps, mins = splat(scale), splat(least)
    return (
        less(times(steps, to_floats(first)), mins),
        less(times(steps, to_floats(second)), mins),
    )


@_inner
def _sixes(codes, at, half, part):  # type: ignore[no-untyped-def]
    """Twice 16 codes, and where the scales of both are."""
    place, shift = at + 64 * half + 32 * (part % 2), np.int32(4 * (part // 2))
    above, bits = at + 128 + 32 * half, np.int32(2 * part)
    three, four, less_half = np.int32(3), np.int32(4), np.int32(-32)
    low = _low(shifted_right(load_bytes(codes, place), shift))
    high = masked(shifted_right(load_bytes(codes, above), bits), three)
    first = plus(either(low, shifted_left(high, four)), less_half)
    low = _low(shifted_right(load_bytes(codes, place + 16), shift))
    high = masked(shifted_right(load_bytes(codes, above + 16), bits), three)
    second = plus(either(low, shifted_left(high, four)), less_half)
    return first, second, at + 192 + 8 * half + 2 * part


def _q6_k(kind, codes, row, step):  # type: ignore[no-untyped-def]
    at = row + (step // 8) * 210
    first, second, scales = _sixes(codes, at, (step % 8) // 4, step % 4)
    whole = load_half(codes, at + 208)
    one = np.float32(whole * np.float32(np.int8(codes[scales])))
    other = np.float32(whole * np.float32(np.int8(codes[scales + 1])))
    return times(splat(one), to_floats(first)), times(splat(other), to_floats(second))


# Sums of products: codes times inputs first, then scaled once for all of a block. Mins are
# multiplied with the sum of the inputs. Rounded otherwise than the numbers of `decode`, by a few
# units of the last place of the largest product.
@_sums
def _scaled_sum(scale, codes, row, at, sums):  # type: ignore[no-untyped-def]
    products = times(to_floats(codes[0]), load_floats(row, at))
    products = times_add(to_floats(codes[1]), load_floats(row, at + 16), products)
    return times_add(splat(scale), products, sums)


def _add_q4_0(kind, codes, at, row, block_sums, step, sums):  # type: ignore[no-untyped-def]
    scale, packed = load_half(codes, at), load_bytes(codes, at + 2)
    sums = _scaled_sum(scale, (_low(packed), _high(packed)), row, step * 32, sums)
    return sums, np.float32(-8.0) * scale * block_sums[step]


def _add_q4_1(kind, codes, at, row, block_sums, step, sums):  # type: ignore[no-untyped-def]
    packed = load_bytes(codes, at + 4)
    pair = _low(packed), _high(packed)
    sums = _scaled_sum(load_half(codes, at), pair, row, step * 32, sums)
    return sums, load_half(codes, at + 2) * block_sums[step]


def _add_q5_0(kind, codes, at, row, block_sums, step, sums):  # type: ignore[no-untyped-def]
    scale = load_half(codes, at)
    sums = _scaled_sum(scale, _five_bits(codes, at + 2), row, step * 32, sums)
    return sums, np.float32(-16.0) * scale * block_sums[step]


def _add_q8_0(kind, codes, at, row, block_sums, step, sums):  # type: ignore[no-untyped-def]
    pair = load_signed(codes, at + 2), load_signed(codes, at + 18)
    return _scaled_sum(load_half(codes, at), pair, row, step * 32, sums), np.float32(0.0)


@_sums
def _all_six_bits(codes, at):  # type: ignore[no-untyped-def]
    """Eight scales and eight mins, a byte each."""
    first, second, third = load_word(codes, at), load_word(codes, at + 4), load_word(codes, at + 8)
    six, four, two = np.int64(0x3F3F3F3F), np.int64(0x0F0F0F0F), np.int64(0x03030303)
    late_scales = (third & four) | (((first >> 6) & two) << 4)
    late_mins = ((third >> 4) & four) | (((second >> 6) & two) << 4)
    return (first & six) | (late_scales << 32), (second & six) | (late_mins << 32)


def _add_q4_k(kind, codes, at, row, block_sums, step, sums):  # type: ignore[no-untyped-def]
    scales, mins = _all_six_bits(codes, at + 4)
    scale, least, taken = load_half(codes, at), load_half(codes, at + 2), np.float32(0.0)
    for pair in range(4):
        first = load_bytes(codes, at + 16 + 32 * pair)
        second = load_bytes(codes, at + 32 + 32 * pair)
        for high in range(2):
            part = 2 * pair + high
            shift = np.int32(4 * high)
            both = _low(shifted_right(first, shift)), _low(shifted_right(second, shift))
            own = scale * np.float32(np.int32((scales >> (8 * part)) & 63))
            sums = _scaled_sum(own, both, row, step * 256 + 32 * part, sums)
            taken += np.float32(np.int32((mins >> (8 * part)) & 63)) * block_sums[8 * step + part]
    return sums, -least * taken


def _add_q5_k(kind, codes, at, row, block_sums, step, sums):  # type: ignore[no-untyped-def]
    scales, mins = _all_six_bits(codes, at + 4)
    scale, least, taken = load_half(codes, at), load_half(codes, at + 2), np.float32(0.0)
    fifths = load_bytes(codes, at + 16), load_bytes(codes, at + 32)
    for part in range(8):
        both = _fives(codes, at + 48 + 32 * (part // 2), fifths, part)
        own = scale * np.float32(np.int32((scales >> (8 * part)) & 63))
        sums = _scaled_sum(own, both, row, step * 256 + 32 * part, sums)
        taken += np.float32(np.int32((mins >> (8 * part)) & 63)) * block_sums[8 * step + part]
    return sums, -least * taken


@_sums
def _add_sixes(low, high, codes, scales, row, place, sums):  # type: ignore[no-untyped-def]
    """Twice 16 codes: their low and high bits; where their scales are, and the whole block's."""
    less_half, whole = np.int32(-32), scales[1]
    numbers = to_floats(plus(either(low[0], high[0]), less_half))
    one = whole * np.float32(np.int8(codes[scales[0]]))
    sums = times_add(splat(one), times(numbers, load_floats(row, place)), sums)
    numbers = to_floats(plus(either(low[1], high[1]), less_half))
    other = whole * np.float32(np.int8(codes[scales[0] + 1]))
    return times_add(splat(other), times(numbers, load_floats(row, place + 16)), sums)


def _add_q6_k(kind, codes, at, row, block_sums, step, sums):  # type: ignore[no-untyped-def]
    whole, top, two, four = load_half(codes, at + 208), np.int32(48), np.int32(2), np.int32(4)
    others = splat(np.float32(0.0))
    for half in range(2):
        low, high = at + 64 * half, at + 128 + 32 * half
        a, b = load_bytes(codes, low), load_bytes(codes, low + 16)
        c, d = load_bytes(codes, low + 32), load_bytes(codes, low + 48)
        e, f = load_bytes(codes, high), load_bytes(codes, high + 16)
        at_scales, place = at + 192 + 8 * half, step * 256 + 128 * half
        bits = masked(shifted_left(e, four), top), masked(shifted_left(f, four), top)
        scales = at_scales, whole
        sums = _add_sixes((_low(a), _low(b)), bits, codes, scales, row, place, sums)
        bits = masked(shifted_left(e, two), top), masked(shifted_left(f, two), top)
        scales = at_scales + 2, whole
        others = _add_sixes((_low(c), _low(d)), bits, codes, scales, row, place + 32, others)
        bits = masked(e, top), masked(f, top)
        scales = at_scales + 4, whole
        sums = _add_sixes((_high(a), _high(b)), bits, codes, scales, row, place + 64, sums)
        bits = masked(shifted_right(e, two), top), masked(shifted_right(f, two), top)
        scales = at_scales + 6, whole
        others = _add_sixes((_high(c), _high(d)), bits, codes, scales, row, place + 96, others)
    return added(sums, others), np.float32(0.0)


# A type of argument for each type of block, by which Numba compiles the loops for each. (Functions
# as arguments would do so too, but what takes such is not kept in Numba's cache.)
class _OfQ40(NamedTuple):
    kind: int = Q4_0


class _OfQ41(NamedTuple):
    kind: int = Q4_1


class _OfQ50(NamedTuple):
    kind: int = Q5_0


class _OfQ80(NamedTuple):
    kind: int = Q8_0


class _OfQ4K(NamedTuple):
    kind: int = Q4_K


class _OfQ5K(NamedTuple):
    kind: int = Q5_K


class _OfQ6K(NamedTuple):
    kind: int = Q6_K


_DECODERS = {
    _OfQ40: _q4_0, _OfQ41: _q4_1, _OfQ50: _q5_0, _OfQ80: _q8_0, _OfQ4K: _q4_k, _OfQ5K: _q5_k,
    _OfQ6K: _q6_k,
}  # fmt: skip
_ADDERS = {
    _OfQ40: _add_q4_0, _OfQ41: _add_q4_1, _OfQ50: _add_q5_0, _OfQ80: _add_q8_0, _OfQ4K: _add_q4_k,
    _OfQ5K: _add_q5_k, _OfQ6K: _add_q6_k,
}  # fmt: skip
OF_Q4_0, OF_Q4_1, OF_Q5_0, OF_Q8_0 = _OfQ40(), _OfQ41(), _OfQ50(), _OfQ80()
OF_Q4_K, OF_Q5_K, OF_Q6_K = _OfQ4K(), _OfQ5K(), _OfQ6K()


def decode(kind: Any, codes: Any, row: Any, step: Any) -> Any:
    """32 weights of the row that begins at `row`: two vectors."""
    raise NotImplementedError  # only in compiled code


@overload(decode, jit_options=_JIT)
def _decoder_of(kind, codes, row, step):  # type: ignore[no-untyped-def]
    return _DECODERS[kind.instance_class]


def add_block(
    kind: Any, codes: Any, at: Any, row: Any, block_sums: Any, step: Any, sums: Any
) -> Any:
    """A block's products added to 16 sums, and what its mins come to, or 0."""
    raise NotImplementedError  # only in compiled code


@overload(add_block, jit_options=_SUMS)
def _adder_of(kind, codes, at, row, block_sums, step, sums):  # type: ignore[no-untyped-def]
    return _ADDERS[kind.instance_class]
