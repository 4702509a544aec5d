"""Numbers at an address, and counters that threads share, for compiled code.

A table of addresses is one argument, where a layer's tensors would be dozens: Python takes longer
to hand these over than some layers take to compute. Whoever makes the table keeps the tensors.
"""

from __future__ import annotations

import platform
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray
from numba.core import cgutils, types
from numba.extending import intrinsic

from penstock.worker.backends.cpu.kernels.loops import OPTIONS, compiled

_SPINS = 2000  # looks at a counter before the core is offered to others; some ten microseconds

_yield_core = types.ExternalFunction("sched_yield", types.int32())


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typing: Any, address: Any) -> Any:
    """For `carray`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _add_one(typing: Any, counters: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.gep(data, [args[1]])
        return builder.atomic_rmw("add", place, ir.IntType(64)(1), "seq_cst")

    return types.int64(counters, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def _look(typing: Any, counters: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "seq_cst", 8)

    return types.int64(counters, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def _pause(typing: Any) -> Any:
    """Tell the processor that this thread waits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, _PAUSE), [])
        return context.get_dummy_value()

    return types.void(), generate


_PAUSE = "llvm.x86.sse2.pause"


@intrinsic  # type: ignore[untyped-decorator]
def call(typing: Any, address: Any, arguments: Any) -> Any:
    """Call the compiled function at an address with a tuple of int64; it answers nothing."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [number] * len(arguments))
        function = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(function, cgutils.unpack_tuple(builder, args[1]))
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate


@numba.njit(**OPTIONS)
def floats_at(address, count):  # type: ignore[no-untyped-def]
    """So many float32 numbers."""
    return carray(pointer(address), (count,), np.float32)


@numba.njit(**OPTIONS)
def matrix_at(address, rows, width):  # type: ignore[no-untyped-def]
    """float32 numbers, row after row."""
    return carray(pointer(address), (rows, width), np.float32)


@numba.njit(**OPTIONS)
def bytes_at(address, count):  # type: ignore[no-untyped-def]
    """So many bytes."""
    return carray(pointer(address), (count,), np.uint8)


@numba.njit(**OPTIONS)
def words_at(address, count):  # type: ignore[no-untyped-def]
    """So many int32 numbers."""
    return carray(pointer(address), (count,), np.int32)


@numba.njit(**OPTIONS)
def integers_at(address, rows, width):  # type: ignore[no-untyped-def]
    """int64 numbers, row after row."""
    return carray(pointer(address), (rows, width), np.int64)


@compiled
def on_threads(function, record, threads):  # type: ignore[no-untyped-def]
    """Call a function of two int64, an address and the thread's number, on each of so many."""
    for part in numba.prange(threads):
        call(function, (record, np.int64(part)))


@numba.njit(**OPTIONS)
def claim(counters):  # type: ignore[no-untyped-def]
    """The next piece of some work that no thread has begun; there may be fewer pieces."""
    return _add_one(counters, 0)


@numba.njit(**OPTIONS)
def finish(counters):  # type: ignore[no-untyped-def]
    """A piece that was claimed is done."""
    _add_one(counters, APART)


@numba.njit(**OPTIONS)
def await_all(counters, pieces):  # type: ignore[no-untyped-def]
    """Until all pieces are done. Each of them is in the hands of a thread that runs."""
    looks = 0
    while _look(counters, APART) < pieces:
        looks += 1
        if looks < _SPINS:
            _pause()
        else:
            _yield_core()


APART = 8  # counters of 8 bytes: begun and done in lines of the processor's cache of their own
