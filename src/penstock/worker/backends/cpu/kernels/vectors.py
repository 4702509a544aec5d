"""Vectors of 16 numbers as values in Numba's code, for loops that its compiler does not vectorise.

Plain LLVM vector operations, nothing of one processor: AVX-512 has a register of that size, AVX2
takes two and NEON four.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

LANES = 16
_MANTISSA_BITS = 23
# e^x for |x| <= ln(2) / 2, highest power first.
_EXPONENTIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
                1.6666665459e-1, 0.5, 1.0, 1.0)  # fmt: skip


class Vector(types.Type):
    """A type of values in compiled code; Python never sees one."""

    def __init__(self, name: str, element: ir.Type) -> None:
        super().__init__(name=name)
        self.llvm = ir.VectorType(element, LANES)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    """Kept in a register."""

    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, kind.llvm)


FLOATS = Vector("float32x16", ir.FloatType())
WORDS = Vector("int32x16", ir.IntType(32))
_I8 = ir.IntType(8)


def _at(context: Any, builder: Any, array_type: Any, place: Any, kind: Any) -> Any:
    """The address of an element of an array, as one of another type."""
    array, index = place
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())


def _splat(builder: Any, value: Any, kind: ir.VectorType) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.IntType(32)(0))
    none = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, first, none)


def _load(element: Any, result: Vector, widen: str | None) -> Any:
    def load(typing: Any, array: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            stored = ir.VectorType(element, LANES)
            address = _at(context, builder, signature.args[0], args, stored)
            loaded = builder.load(address, align=1)
            return loaded if widen is None else getattr(builder, widen)(loaded, result.llvm)

        return result(array, types.intp), generate

    return intrinsic(load)


load_floats = _load(ir.FloatType(), FLOATS, None)  # of a float32 array, at an index
load_bytes = _load(_I8, WORDS, "zext")  # of a uint8 array
load_signed = _load(_I8, WORDS, "sext")  # the same, as int8


@intrinsic  # type: ignore[untyped-decorator]
def load_half(typing: Any, array: Any, index: Any) -> Any:
    """The float16 number at a place of a uint8 array, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _at(context, builder, signature.args[0], args, ir.HalfType())
        return builder.fpext(builder.load(address, align=1), ir.FloatType())

    return types.float32(array, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_bfloat16(typing: Any, array: Any, index: Any) -> Any:
    """The bfloat16 number at an index of an int16 array, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, half = ir.IntType(32), ir.IntType(16)
        address = _at(context, builder, signature.args[0], args, half)
        bits = builder.shl(builder.zext(builder.load(address, align=2), word), word(16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(array, types.intp), generate


def _bitcast(given: Any, wanted: Any) -> Any:
    def cast(typing: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(wanted))

        return wanted(given), generate

    return intrinsic(cast)


as_bits = _bitcast(types.float32, types.uint32)  # of a float32
as_number = _bitcast(types.uint32, types.float32)  # the other way


@intrinsic  # type: ignore[untyped-decorator]
def load_word(typing: Any, array: Any, index: Any) -> Any:
    """The 32 bits at a place of a uint8 array, as int64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _at(context, builder, signature.args[0], args, ir.IntType(32))
        return builder.zext(builder.load(address, align=1), ir.IntType(64))

    return types.int64(array, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Have the line of a place of a uint8 array brought near; it may be behind the array's end."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _at(context, builder, signature.args[0], args, _I8)
        number, pointer = ir.IntType(32), address.type
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = _declared(builder, kind, "llvm.prefetch.p0")
        builder.call(function, [address, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_floats(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Into a float32 array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _at(context, builder, signature.args[0], args[:2], FLOATS.llvm)
        builder.store(args[2], address, align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, FLOATS), generate


@intrinsic  # type: ignore[untyped-decorator]
def splat(typing: Any, value: Any) -> Any:
    """A float32 in every lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, args[0], FLOATS.llvm)

    return FLOATS(types.float32), generate


def _with_number(operation: str) -> Any:
    def act(typing: Any, words: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, operation)(args[0], _splat(builder, args[1], WORDS.llvm))

        return WORDS(WORDS, types.int32), generate

    return intrinsic(act)


masked = _with_number("and_")
shifted_right = _with_number("lshr")
shifted_left = _with_number("shl")
plus = _with_number("add")


@intrinsic  # type: ignore[untyped-decorator]
def either(typing: Any, one: Any, other: Any) -> Any:
    """The bits of both."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.or_(*args)

    return WORDS(WORDS, WORDS), generate


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(typing: Any, word: Any) -> Any:
    """The lowest 16 bits of a number, one in each lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = ir.Constant(WORDS.llvm, list(range(LANES)))
        bits = builder.lshr(_splat(builder, args[0], WORDS.llvm), places)
        return builder.and_(bits, ir.Constant(WORDS.llvm, [1] * LANES))

    return WORDS(types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def to_floats(typing: Any, words: Any) -> Any:
    """Each as a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(args[0], FLOATS.llvm)

    return FLOATS(WORDS), generate


def _pairwise(operation: str) -> Any:
    def act(typing: Any, one: Any, other: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, operation)(*args)

        return FLOATS(FLOATS, FLOATS), generate

    return intrinsic(act)


divided = _pairwise("fdiv")
times = _pairwise("fmul")
added = _pairwise("fadd")
less = _pairwise("fsub")


@intrinsic  # type: ignore[untyped-decorator]
def times_add(typing: Any, one: Any, other: Any, sums: Any) -> Any:
    """one * other + sums, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(FLOATS.llvm, [FLOATS.llvm] * 3)
        function = _declared(builder, kind, f"llvm.fma.v{LANES}f32")
        return builder.call(function, args)

    return FLOATS(FLOATS, FLOATS, FLOATS), generate


@intrinsic  # type: ignore[untyped-decorator]
def exponential(typing: Any, powers: Any) -> Any:
    """e to the power of each, to within two units of the last place; of NaN it is NaN.

    Powers below -87 or above 88 count as these: nothing becomes 0 or infinite.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = FLOATS.llvm
        fused = _declared(builder, ir.FunctionType(kind, [kind] * 3), f"llvm.fma.v{LANES}f32")

        def every(number: float) -> Any:
            return ir.Constant(kind, [float(np.float32(number))] * LANES)

        # Comparisons with NaN are false, so that it stays.
        power = args[0]
        for relation, bound in (("<", -87.0), (">", 88.0)):
            beyond = builder.fcmp_ordered(relation, power, every(bound))
            power = builder.select(beyond, every(bound), power)
        # Added to so large a number, the nearest integer is in the lowest bits.
        shifter = every(12582912.0)
        shifted = builder.call(fused, [power, every(1.4426950408889634), shifter])
        twos = builder.fsub(shifted, shifter)
        rest = builder.call(fused, [twos, every(-0.693145751953125), power])
        rest = builder.call(fused, [twos, every(-1.428606765330187e-06), rest])
        answer = every(_EXPONENTIAL[0])
        for factor in _EXPONENTIAL[1:]:
            answer = builder.call(fused, [answer, rest, every(factor)])
        words = WORDS.llvm
        exponent = builder.shl(
            builder.bitcast(shifted, words), ir.Constant(words, [_MANTISSA_BITS] * LANES)
        )
        return builder.bitcast(builder.add(builder.bitcast(answer, words), exponent), kind)

    return FLOATS(FLOATS), generate


@intrinsic  # type: ignore[untyped-decorator]
def larger(typing: Any, one: Any, other: Any) -> Any:
    """Of each lane the larger number; where the first is none, the other's."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return FLOATS(FLOATS, FLOATS), generate


@intrinsic  # type: ignore[untyped-decorator]
def largest(typing: Any, vector: Any) -> Any:
    """Of all lanes; those that are no numbers do not count."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [FLOATS.llvm])
        function = _declared(builder, kind, f"llvm.vector.reduce.fmax.v{LANES}f32")
        return builder.call(function, args)

    return types.float32(FLOATS), generate


@intrinsic  # type: ignore[untyped-decorator]
def total(typing: Any, vector: Any) -> Any:
    """The sum of all lanes, in any order."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), FLOATS.llvm])
        function = _declared(builder, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
        return builder.call(function, [ir.FloatType()(0.0), args[0]], fastmath=("reassoc",))

    return types.float32(FLOATS), generate


def _declared(builder: Any, kind: ir.FunctionType, name: str) -> Any:
    module = builder.module
    return module.globals.get(name) or ir.Function(module, kind, name)
