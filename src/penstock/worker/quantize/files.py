"""safetensors files written piece by piece: their tensors are known before any of their bytes.

The library itself wants all tensors of a file in memory at once.
"""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING, Any, Self

import torch

from penstock.config.private import FILE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from penstock.catalog.weights import Tensor as Header

_ALIGNMENT = 8  # of the data, whose largest elements come first
_LENGTH = struct.Struct("<Q")


class TensorFile:
    """One file; each tensor's rows are written in their order, those of several in any."""

    def __init__(self, path: Path, tensors: Mapping[str, Header]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        self._places: dict[str, list[int]] = {}  # where its next byte goes, and its end
        for name in sorted(tensors, key=lambda name: (-_item_bytes(tensors[name]), name)):
            of = tensors[name]
            end = offset + of.size_bytes
            header[name] = {
                "dtype": of.dtype, "shape": list(of.shape), "data_offsets": [offset, end],
            }  # fmt: skip
            self._places[name] = [offset, end]
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        for place in self._places.values():
            place[:] = (number + _LENGTH.size + len(text) for number in place)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE)
        self._write(memoryview(_LENGTH.pack(len(text)) + text), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            os.close(self._descriptor)

    def write(self, name: str, rows: Tensor) -> None:
        """The next rows of a tensor."""
        content = rows.contiguous().reshape(-1).view(torch.uint8).numpy().data
        place = self._places[name]
        self._write(content, place[0])
        place[0] += len(content)

    def _write(self, content: memoryview, offset: int) -> None:
        while content:
            written = os.pwrite(self._descriptor, content, offset)
            content, offset = content[written:], offset + written

    def _finish(self) -> None:
        """Durable, and out of the page cache: models that are served need it more."""
        assert all(begin == end for begin, end in self._places.values())
        os.fsync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _item_bytes(tensor: Header) -> int:
    return tensor.size_bytes // max(1, tensor.elements)
