"""Kernels over KV compile for a GPU in every format, where Triton is there; a GPU need not be.

What they compute is tested in `tests/gpu`, on a GPU or, slowly, in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton")

POINTERS = {
    **dict.fromkeys(("sums", "tops"), "*fp32"),
    **dict.fromkeys(
        ("tables", "starts", "contexts", "items", "counts", "tiles", "arrivals", "slots"), "*i32"
    ),
}
NUMBERS = {
    *("rows", "out", "new_keys", "new_values", "sinks", "packed", "cos", "sin", "query_norm"),
    *("key_norm", "queries"),
}
HEADS = {"BLOCK": 16, "KV_HEADS": 8, "GROUP": 4, "GP": 16, "DK": 128, "DV": 80, "DKP": 128}
MASK = {"DVP": 128, "N": 32, "M": 64, "WINDOW": 50, "SOFTCAP": 20.0, "SINKS": True}
LAYER = {"HEADS": 32, "DIM": 128, "HALF": 64, "TOGETHER": 8, "NORMS": True, "EARLY": True}
FORMATS = [("bf16", "bf16"), ("bf16", "i8"), ("fp16", "i8"), ("fp32", "i8")]


def kernels() -> dict[str, Any]:
    from penstock.worker.backends.cuda.kernels import (
        triton_attention,
        triton_chunks,
        triton_kv,
        triton_layer,
    )

    return {
        "store": triton_kv._store,
        "rotate and store": triton_layer._rotate_and_store,
        "decode": triton_attention._decode,
        "chunks": triton_chunks._chunks,
    }


def kind(name: str, dtype: str, kept: str) -> str:
    if name in ("keys", "values"):
        return f"*{kept}"
    if name in ("key_scales", "value_scales"):
        return "*bf16" if kept == "i8" else f"*{kept}"
    if name.isupper():
        return "constexpr"
    if name in NUMBERS:
        return f"*{dtype}"
    return POINTERS.get(name, "fp32" if name in ("scale", "epsilon") else "i32")


@pytest.mark.parametrize(("dtype", "kept"), FORMATS)
@pytest.mark.parametrize("name", ["store", "rotate and store", "decode", "chunks"])
def test_kernels_compile(name: str, dtype: str, kept: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = kernels()[name]
    precision = "ieee" if dtype == "fp32" else "tf32"
    chosen = {**HEADS, **MASK, **LAYER, "PRECISION": precision, "SCALED": kept == "i8"}
    signature = {part: kind(part, dtype, kept) for part in kernel.arg_names}
    constants = {
        (place,): chosen[part] for place, part in enumerate(kernel.arg_names) if part in chosen
    }
    source = ASTSource(kernel, signature, constants)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert found.metadata.shared < 200 << 10
