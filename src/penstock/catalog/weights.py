"""What a safetensors checkpoint says about itself: names, shapes and dtypes from its headers.

Owns the file format and its checks (complete, consistent, inside the folder). Reads headers only,
never a weight, and never unpickles: a folder that has nothing but pickled weights is refused.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from penstock.catalog.gguf import checkpoint as gguf
from penstock.catalog.linear_formats import (
    MADE_AT_LOAD,
    check_quantisation,
    is_unused,
    packed_linears,
    quantisation,
    scratch_bytes,
    split_name,
)
from penstock.errors import ModelUnusable, shortened
from penstock.memory.device_kinds import CPU, DeviceKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.catalog.linear_formats import FormattedWeight

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 32 << 20  # of one file: 200,000 tensors; the format allows 100 MB
_MAX_JSON_BYTES = 64 << 20  # the index of 500,000 tensors
# In any of these files. One takes a hundred bytes in memory, and two in the file.
_MAX_VALUES = 1 << 21

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
    value = _read_json(path)
    if not isinstance(value, dict):
        raise ModelUnusable(f"{path} holds a JSON {type(value).__name__}, not an object.")
    return value


def read_json_list(path: Path) -> list[Any]:
    """The list in a JSON file; anything else is an error that names the file."""
    value = _read_json(path)
    if not isinstance(value, list):
        raise ModelUnusable(f"{path} holds a JSON {type(value).__name__}, not a list.")
    return value


def _read_json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_JSON_BYTES + 1)
        if len(text) > _MAX_JSON_BYTES:
            raise ModelUnusable(f"{path} is longer than {_MAX_JSON_BYTES} bytes.")
        _check_values(text)
        return json.loads(text.decode("utf-8"))
    except FileNotFoundError:
        raise ModelUnusable(f"{path} is missing.") from None
    except OSError as error:
        raise ModelUnusable(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelUnusable(f"{path} is not valid JSON: {error}.") from error


def _check_values(text: bytes) -> None:
    if sum(map(text.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise ValueError(f"it has more than {_MAX_VALUES} values")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint in `folder`, over all its shards."""
    if (folder / INDEX_FILE).exists():
        return _read_shards(folder)
    if (file := gguf_file(folder)) is not None:
        return {
            entry.name: Tensor(entry.dtype, entry.shape, entry.size_bytes)
            for entry in gguf.read_entries(file)
        }
    return read_header(_single_file(folder))


def weight_files(folder: Path) -> list[Path]:
    """The files that hold them."""
    if (folder / INDEX_FILE).exists():
        return [folder / shard for shard in sorted(_shards(folder))]
    if (file := gguf_file(folder)) is not None:
        return gguf.split_files(file)
    return [_single_file(folder)]


def gguf_file(folder: Path) -> Path | None:
    """The first GGUF file of a folder that has its weights in such; None: it has safetensors."""
    if any((folder / name).exists() for name in (INDEX_FILE, SINGLE_FILE)):
        return None
    models = gguf.models_among([path.name for path in folder.glob("*.gguf")])
    if len(models) > 1:
        raise ModelUnusable(
            f"{folder} has {len(models)} GGUF models ({', '.join(sorted(models)[:4])}); a model's "
            "folder has one. `penstock pull FILE` makes a folder of each."
        )
    return folder / next(iter(models)) if models else None


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


def _shards(folder: Path) -> dict[str, set[str]]:
    """The tensors of each file that the index names."""
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
    return shards


def _read_shards(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard, names in sorted(_shards(folder).items()):
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
        _check_values(text)
        header = _header_decoder.decode(text)
        _metadata_decoder.decode(header.pop("__metadata__", _NO_METADATA))
        entries = {name: _entry_decoder.decode(value) for name, value in header.items()}
        data_bytes = _check_entries(entries)
    except (ValueError, RecursionError) as error:
        raise ModelUnusable(f"{path} has a broken safetensors header: {error}.") from error
    expected_bytes = _LENGTH.size + header_bytes + data_bytes
    if size_bytes != expected_bytes:
        raise ModelUnusable(
            f"{path} is {size_bytes} bytes but its header describes {expected_bytes}; it is "
            "truncated or damaged, so fetch it again."
        )
    return {
        name: Tensor(entry.dtype, tuple(entry.shape), entry.size_bytes)
        for name, entry in entries.items()
    }


class _Entry(msgspec.Struct, gc=False):
    """Of a header: one tensor."""

    dtype: str
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=16)]
    data_offsets: tuple[int, int]

    @property
    def size_bytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


# Values stay text until their form is known: what has another one is never made.
_header_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_metadata_decoder = msgspec.json.Decoder(dict[str, str])
_entry_decoder = msgspec.json.Decoder(_Entry)
_NO_METADATA = msgspec.Raw(b"{}")


def _check_entries(entries: Mapping[str, _Entry]) -> int:
    """How many bytes of data they describe, one behind the other as the format wants it."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in _BITS:
            raise ValueError(f"{shortened(name)} is of the unknown dtype {shortened(entry.dtype)}")
        if entry.data_offsets[0] != end:
            what = (
                "overlaps the tensor before it" if entry.data_offsets[0] < end else "leaves a gap"
            )
            raise ValueError(f"{shortened(name)} {what} at byte {end}")
        if entry.size_bytes * 8 != math.prod(entry.shape) * _BITS[entry.dtype]:
            raise ValueError(
                f"the shape {shortened(str(entry.shape))} of {shortened(name)} in {entry.dtype} "
                f"does not fill {entry.size_bytes} bytes"
            )
        end = entry.data_offsets[1]
    return end


def packed_weights(folder: Path, dtype: str) -> dict[str, FormattedWeight]:
    """Weights that stay packed in memory with a `dtype` setting, by the names of their modules."""
    config_path = folder / "config.json"
    tensors, config = read_tensors(folder), read_json(config_path)
    said = quantisation(config)
    check_quantisation(config, bool(packed_linears(tensors, "", folder, said)), config_path)
    return packed_linears(tensors, dtype, folder, said)


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a checkpoint's weights in a packed format."""

    parameters: int = 0
    resident_bytes: int = 0

    @classmethod
    def of(cls, linears: Iterable[FormattedWeight]) -> Part:
        """Their sums."""
        all_of_them = list(linears)
        return cls(
            sum(linear.parameters for linear in all_of_them),
            sum(linear.resident_bytes for linear in all_of_them),
        )


@dataclass(frozen=True, slots=True)
class Weights:
    """The sums that matter about a checkpoint."""

    parameters: int
    stored_bytes: int
    dtype: str  # torch's name of the dtype of most bytes that are not packed
    kept_bytes: int  # elements that keep their stored form in memory (positions, masks, ...)
    formats: tuple[str, ...] = ()  # of its packed weights, by name
    # What is packed in memory, by the `dtype` setting: "" for any that makes no format at load.
    packed: Mapping[str, Part] = field(default_factory=dict)

    def bytes_as(self, dtype: str, made: str = "", kind: DeviceKind = CPU) -> int:
        """Bytes in memory once every parameter that is not packed is a `dtype` ("auto": as stored);
        `made` is the format that plain weights of layers are rounded to at load, `kind` that of the
        device."""
        wanted = self.dtype if dtype == "auto" else dtype
        if wanted not in ITEM_BYTES:
            raise ModelUnusable(
                f"dtype {wanted!r} is not one of auto, {', '.join(sorted(ITEM_BYTES))}.",
                param="dtype",
            )
        if made and made not in self.packed:
            raise ModelUnusable(
                f"a model of random weights is not rounded to {made}: choose another dtype.",
                param="dtype",
            )
        packed = self.packed.get(made, Part())
        plain = (self.parameters - packed.parameters) * ITEM_BYTES[wanted]
        scratch = scratch_bytes(packed.resident_bytes, kind)
        return plain + packed.resident_bytes + scratch + self.kept_bytes


def sum_weights(tensors: dict[str, Tensor], path: Path, said: Mapping[str, Any]) -> Weights:
    """Add up a checkpoint; `said` is its quantization_config."""
    linears = packed_linears(tensors, "", path, said)
    parameters = sum(linear.parameters for linear in linears.values())
    stored = kept = 0
    by_dtype: dict[str, int] = {}
    for name, tensor in tensors.items():
        stored += tensor.size_bytes
        module, leaf = split_name(name)
        # Of packed weights only the bytes in memory count, not which tensors they come from.
        packed = linears.get(module)
        if (packed is not None and leaf in packed.tensors) or (linears and is_unused(name)):
            continue
        if tensor.dtype in TORCH_NAMES:
            parameters += tensor.elements
            by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.size_bytes
        else:
            kept += tensor.size_bytes
    if not by_dtype or not parameters:
        raise ModelUnusable(f"{path} has no floating-point weights.")
    largest = max(by_dtype, key=lambda tag: by_dtype[tag])
    return Weights(
        parameters,
        stored,
        TORCH_NAMES[largest],
        kept,
        tuple(sorted({linear.format.name for linear in linears.values()})),
        {
            made: Part.of(packed_linears(tensors, made, path, said).values())
            for made in ("", *MADE_AT_LOAD)
        },
    )
