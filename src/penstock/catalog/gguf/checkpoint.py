"""The weights of a model in GGUF files, under the names that transformers has for them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.catalog.gguf.configuration import Facts, head_dim
from penstock.catalog.gguf.header import models_among, read_split, split_files
from penstock.catalog.gguf.names import Change, Place, place_of
from penstock.errors import ModelUnusable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.catalog.gguf.blocks import BlockType
    from penstock.catalog.gguf.header import GgufTensor

__all__ = ["Entry", "models_among", "read_entries", "read_facts", "read_numbers", "split_files"]

_ROUTER = "mlp.gate.weight"  # not a linear layer to transformers
_MAX_NUMBERS = 1 << 16  # of a tensor that belongs to the configuration


@dataclass(frozen=True, slots=True)
class Entry:
    """One weight of the model, and where it is."""

    name: str
    shape: tuple[int, ...]
    block: BlockType
    file: Path
    offset: int
    size_bytes: int
    change: Change
    head_dim: int  # of rows that are in another order

    @property
    def is_packed(self) -> bool:
        """Whether it stays in memory as it is in the file."""
        matrix = len(self.shape) == 2 and not self.name.endswith(_ROUTER)
        return matrix and self.block.name != "F32"

    @property
    def dtype(self) -> str:
        """Its dtype to the catalog: that of a plain tensor, or one for each type of block."""
        return f"GGUF_{self.block.name}" if self.is_packed else self.block.name


def read_entries(path: Path) -> list[Entry]:
    """All weights of the model that the file `path` is the first of."""
    facts = read_facts(path)
    dim = head_dim(facts)
    entries = [
        entry
        for file, header in read_split(path).items()
        for name, tensor in header.tensors.items()
        if (place := place_of(name, facts.architecture, path)) is not None
        for entry in _entries(file, tensor, place, dim)
    ]
    for entry in entries:
        if not entry.is_packed and not entry.block.is_plain:
            raise ModelUnusable(
                f"{entry.file}: {entry.name} {list(entry.shape)} is quantised as "
                f"{entry.block.name}, but is not the weight of a linear layer."
            )
    return entries


def read_facts(path: Path, *, vocabulary: bool = False) -> Facts:
    """The metadata of a model and all of its tensors."""
    headers = list(read_split(path, vocabulary=vocabulary).values())
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    return Facts(headers[0].metadata, tensors, path)


def read_numbers(path: Path, name: str) -> list[float]:
    """The numbers of a small float32 tensor."""
    for file, header in read_split(path).items():
        if (tensor := header.tensors.get(name)) is None:
            continue
        if tensor.block.name != "F32" or tensor.size_bytes > 4 * _MAX_NUMBERS:
            break
        with file.open("rb") as data:
            data.seek(tensor.offset)
            return [n for (n,) in struct.iter_unpack("<f", data.read(tensor.size_bytes))]
    raise ModelUnusable(f"{path} has no {name} of at most {_MAX_NUMBERS} float32 numbers.")


def _entries(file: Path, tensor: GgufTensor, place: Place, dim: int) -> Iterator[Entry]:
    if not place.is_stacked:
        yield Entry(
            place.name, tensor.shape, tensor.block, file, tensor.offset, tensor.size_bytes,
            place.change, dim,
        )  # fmt: skip
        return
    if len(tensor.shape) != 3:
        raise ModelUnusable(
            f"{file}: the experts' {place.name} has {len(tensor.shape)} dimensions instead of 3."
        )
    size_bytes = tensor.size_bytes // tensor.shape[0]
    for expert in range(tensor.shape[0]):
        offset = tensor.offset + expert * size_bytes
        yield Entry(
            place.name.format(expert), tensor.shape[1:], tensor.block, file, offset, size_bytes,
            place.change, dim,
        )  # fmt: skip
