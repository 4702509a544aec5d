"""Tensors of a model in GGUF files, under the names and in the order that transformers has.

Files are mapped: what needs no other order stays a clean page of its file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.catalog.gguf.checkpoint import Entry, read_entries
from penstock.catalog.gguf.names import Change
from penstock.errors import ModelUnusable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stored(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the model that the file `path` is the first of: numbers, or packed ones as
    rows of bytes."""
    mapped: dict[Path, Tensor] = {}
    for entry in read_entries(path):
        if entry.file not in mapped:
            size = entry.file.stat().st_size
            mapped[entry.file] = torch.from_file(
                str(entry.file), shared=False, size=size, dtype=torch.uint8
            )
        yield entry.name, _tensor(entry, mapped[entry.file])


def _tensor(entry: Entry, file: Tensor) -> Tensor:
    content = file[entry.offset : entry.offset + entry.size_bytes]
    if entry.is_packed:
        tensor = content.view(entry.shape[0], -1)
    else:
        tensor = content.view(_PLAIN[entry.block.name]).view(entry.shape)
    if entry.change is Change.PAIRED:
        return _in_halves(tensor, entry.head_dim)
    return tensor - 1 if entry.change is Change.PLUS_ONE else tensor


def _in_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of heads whose rotated pairs are neighbours, in transformers' order: the first of all
    pairs, then the second. Rows keep what they are, so packed ones stay exact."""
    if head_dim % 2 or len(rows) % head_dim:
        raise ModelUnusable(f"{len(rows)} rows of queries or keys are not heads of {head_dim}.")
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
