"""Where each layer's recurrent state lies in a slot.

    slot 0                                           slot 1
    [layer 0: columns | matrices][layer 1: ...] ...  [layer 0: columns | matrices] ...

Columns are the last inputs of a layer's short convolution, one fewer than its kernel is long. All
of a sequence lies side by side, so that one copy takes or restores a snapshot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from penstock.catalog.states import ALIGNMENT, slot_bytes
from penstock.worker.kv.layout.cutter import Cutter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateGeometry:
    """What one layer keeps of a sequence."""

    channels: int  # of the convolution
    columns: int
    dtype: str  # of the columns
    matrices: tuple[int, ...] = ()  # shape of what is in float32; (): nothing

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of columns and matrices."""
        item = getattr(torch, self.dtype).itemsize
        matrices = math.prod(self.matrices) if self.matrices else 0
        return self.channels * self.columns * item, matrices * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class LayerStates:
    """One layer's states in all slots."""

    columns: Tensor  # [slots, channels, columns]
    matrices: Tensor | None  # [slots, ...], float32


@dataclass(frozen=True, slots=True)
class StateLayout:
    """How a slot is laid out over the layers."""

    layers: tuple[StateGeometry, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return slot_bytes(size for layer in self.layers for size in layer.sizes)

    def views(self, memory: Tensor) -> tuple[LayerStates, ...]:
        """Each layer's part of the slots that `memory` (bytes) consists of."""
        cutter = Cutter(memory, self.slot_bytes)
        found = []
        for layer in self.layers:
            dtype = getattr(torch, layer.dtype)
            columns = cutter.cut(dtype, layer.channels, layer.columns)
            cutter.align(ALIGNMENT)
            matrices = cutter.cut(torch.float32, *layer.matrices) if layer.matrices else None
            cutter.align(ALIGNMENT)
            found.append(LayerStates(columns, matrices))
        return tuple(found)
