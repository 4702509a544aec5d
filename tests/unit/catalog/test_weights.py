"""Headers of safetensors files: what they claim is checked before anything is made of it."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from penstock.catalog.weights import read_header
from penstock.errors import ModelUnusable

if TYPE_CHECKING:
    from pathlib import Path


def floats(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": floats(0, 64), "b": floats(0, 64)}, "b overlaps the tensor before it at byte 64"),
        ({"a": floats(0, 64), "b": floats(32, 64)}, "b overlaps the tensor before it"),
        ({"a": floats(0, 32), "b": floats(36, 64)}, "b leaves a gap at byte 32"),
        ({"a": floats(-32, 64)}, "a overlaps"),
        ({"a": floats(0, 64), "__metadata__": {"a": [[]] * 9}}, "Expected `str`, got `array`"),
        ({"a": floats(0, 64), "__metadata__": [[]]}, "Expected `object`, got `array`"),
        ({"a": {**floats(0, 64), "shape": [[[]]]}}, "Expected `int`, got `array`"),
        ({"a": {**floats(0, 64), "shape": [-4, -4]}}, "Expected `int` >= 0"),
        ({"a": {**floats(0, 64), "shape": [1 << 62] * 99}}, "array` of length <= 16"),
        ({"a": {**floats(0, 64), "dtype": "F33"}}, "a is of the unknown dtype F33"),
        ({"a": {**floats(0, 64), "shape": [15]}}, r"the shape \[15\] of a in F32 does not fill 64"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    with pytest.raises(ModelUnusable, match=f"broken safetensors header: .*{message}"):
        read_header(path)


@pytest.mark.parametrize(
    "inside", [b'"__metadata__":[%b]' % (b"[]," * 4_000_000), b'"a":0,' * 3_000_000]
)
def test_a_header_of_many_small_values_takes_no_memory(tmp_path: Path, inside: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(inside) + 2) + b"{" + inside + b"}")
    tracemalloc.start()
    with pytest.raises(ModelUnusable, match="it has more than 2097152 values"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * len(inside)
