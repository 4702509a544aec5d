"""What a safetensors checkpoint says about itself: names, shapes and dtypes from its headers.

Owns the file format and its checks (complete, consistent, inside the folder). Reads headers only,
never a weight, and never unpickles: a folder that has nothing but pickled weights is refused.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ModelUnusable

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit

# safetensors' names for dtypes, with the bits of one element (some are smaller than a byte).
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
    "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
}
ITEM_BYTES = {name: _BITS[tag] // 8 for tag, name in TORCH_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a header."""

    dtype: str  # safetensors' name: "F32", "BF16", ...
    shape: tuple[int, ...]
    size_bytes: int

    @property
    def elements(self) -> int:
        """How many stored elements it has."""
        return math.prod(self.shape)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; anything else is an error that names the file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelUnusable(f"{path} is missing.") from None
    except OSError as error:
        raise ModelUnusable(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelUnusable(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelUnusable(f"{path} holds a JSON {type(value).__name__}, not an object.")
    return value


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint in `folder`, over all its shards."""
    if (folder / INDEX_FILE).exists():
        return _read_shards(folder)
    return read_header(_single_file(folder))


def _single_file(folder: Path) -> Path:
    if (folder / SINGLE_FILE).exists():
        return folder / SINGLE_FILE
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if found:
        raise ModelUnusable(
            f"{folder} has {', '.join(found[:3])}{' ...' if len(found) > 3 else ''} but neither "
            f"{SINGLE_FILE} nor {INDEX_FILE}; the download may be incomplete."
        )
    pickled = sorted(
        path.name for end in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(end)
    )
    if pickled:
        raise ModelUnusable(
            f"{folder} has only pickled weights ({', '.join(pickled[:3])}), which can run code "
            "when they are read; convert them to safetensors first."
        )
    raise ModelUnusable(f"{folder} has no weights: {SINGLE_FILE} is missing.")


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index_path = folder / INDEX_FILE
    mapping = read_json(index_path).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise ModelUnusable(f"{index_path} has no weight_map.")
    shards: dict[str, set[str]] = {}
    for tensor, shard in mapping.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelUnusable(f"{index_path} maps {tensor} to {shard!r}, not a file beside it.")
        shards.setdefault(shard, set()).add(tensor)
    missing = sorted(shard for shard in shards if not (folder / shard).exists())
    if missing:
        raise ModelUnusable(
            f"{folder} lacks {len(missing)} of its {len(shards)} weight files ({missing[0]} is the "
            "first); the download is incomplete."
        )
    tensors: dict[str, Tensor] = {}
    for shard, names in sorted(shards.items()):
        header = read_header(folder / shard)
        if lost := sorted(names - header.keys()):
            raise ModelUnusable(f"{folder / shard} lacks {lost[0]}, which {INDEX_FILE} promises.")
        tensors.update((name, header[name]) for name in names)
    return tensors


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, after checking that the file is all there."""
    try:
        with path.open("rb") as file:
            size_bytes = path.stat().st_size
            start = file.read(_LENGTH.size)
            if len(start) < _LENGTH.size:
                raise ModelUnusable(f"{path} is {size_bytes} bytes, too short to be safetensors.")
            (header_bytes,) = _LENGTH.unpack(start)
            if header_bytes > min(_MAX_HEADER_BYTES, size_bytes - _LENGTH.size):
                raise ModelUnusable(
                    f"{path} is {size_bytes} bytes but starts with a header length of "
                    f"{header_bytes}; it is truncated or not a safetensors file."
                )
            text = file.read(header_bytes)
    except OSError as error:
        raise ModelUnusable(f"{path} cannot be read: {error.strerror}.") from error
    try:
        header = json.loads(text)
        entries = {name: _entry(value) for name, value in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelUnusable(f"{path} has a broken safetensors header: {error}.") from error
    data_bytes = max((end for _, end in entries.values()), default=0)
    expected_bytes = _LENGTH.size + header_bytes + data_bytes
    if size_bytes != expected_bytes:
        raise ModelUnusable(
            f"{path} is {size_bytes} bytes but its header describes {expected_bytes}; it is "
            "truncated or damaged, so fetch it again."
        )
    return {name: tensor for name, (tensor, _) in entries.items()}


def _entry(value: dict[str, Any]) -> tuple[Tensor, int]:
    """A header entry and the offset at which its data ends."""
    begin, end = value["data_offsets"]
    shape = tuple(value["shape"])
    dtype = value["dtype"]
    if dtype not in _BITS:
        raise ValueError(f"unknown dtype {dtype!r}")
    if not all(isinstance(number, int) and number >= 0 for number in (begin, end, *shape)):
        raise ValueError("offsets and shapes must be non-negative integers")
    if (end - begin) * 8 != math.prod(shape) * _BITS[dtype]:
        raise ValueError(f"shape {list(shape)} of {dtype} does not fill {end - begin} bytes")
    return Tensor(dtype, shape, end - begin), end


@dataclass(frozen=True, slots=True)
class Weights:
    """The sums that matter about a checkpoint."""

    parameters: int
    stored_bytes: int
    dtype: str  # torch's name of the dtype that holds most of the bytes
    kept_bytes: int  # elements that keep their stored form in memory (positions, masks, ...)

    def bytes_as(self, dtype: str) -> int:
        """Bytes in memory once every parameter is a `dtype` ("auto": as stored)."""
        wanted = self.dtype if dtype == "auto" else dtype
        if wanted not in ITEM_BYTES:
            raise ModelUnusable(
                f"dtype {wanted!r} is not one of auto, {', '.join(sorted(ITEM_BYTES))}.",
                param="dtype",
            )
        return self.parameters * ITEM_BYTES[wanted] + self.kept_bytes


def sum_weights(tensors: dict[str, Tensor], packed_bits: int | None, path: Path) -> Weights:
    """Add up a checkpoint; `packed_bits` is the width of a weight packed into integers.

    Quantised weights count as the parameters they stand for, since they are de-quantised on load.
    """
    parameters = stored = kept = 0
    by_dtype: dict[str, int] = {}
    for name, tensor in tensors.items():
        stored += tensor.size_bytes
        if tensor.dtype in TORCH_NAMES:
            parameters += tensor.elements
            by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.size_bytes
        elif packed_bits is not None and _is_packed(name):
            parameters += tensor.size_bytes * 8 // packed_bits
        else:
            kept += tensor.size_bytes
    if not by_dtype or not parameters:
        raise ModelUnusable(f"{path} has no floating-point weights.")
    largest = max(by_dtype, key=lambda tag: by_dtype[tag])
    return Weights(parameters, stored, TORCH_NAMES[largest], kept)


def _is_packed(name: str) -> bool:
    last = name.rsplit(".", 1)[-1]
    return last in ("qweight", "weight", "weight_packed") or last.endswith("_blocks")
