"""Views of the same place in every block of an arena."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Cutter:
    """Views of the same place in every block, one place after the other."""

    def __init__(self, memory: Tensor, block_bytes: int) -> None:
        self._memory = memory
        self._block_bytes = block_bytes
        self._offset = 0  # in a block

    def cut(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """[blocks, *shape], behind what was cut before."""
        size = dtype.itemsize
        strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        view = self._memory.view(dtype).as_strided(
            (len(self._memory) // self._block_bytes, *shape),
            (self._block_bytes // size, *strides),
            self._offset // size,
        )
        self._offset += math.prod(shape) * size
        return view

    def align(self, size: int) -> None:
        """Begin the next one at a multiple of so many bytes."""
        self._offset = -(-self._offset // size) * size
