"""The memory behind the slots of recurrent states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.worker.kv.arena import ByteArena
from penstock.worker.kv.layout.layer_states import StateLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.worker.kv.device import KvDevice
    from penstock.worker.kv.layout.layer_states import LayerStates, StateGeometry


class StateMemory(ByteArena):
    """Slots in an address range of their own; nothing is committed yet."""

    def __init__(
        self,
        layers: Mapping[int, StateGeometry],
        slots: int,
        device: KvDevice,
        extent_bytes: int | None = None,
    ) -> None:
        """`layers` by the model's own numbers."""
        self.layout = StateLayout(tuple(layers.values()))
        super().__init__(self.layout.slot_bytes, slots, device, extent_bytes)
        self.layers = dict(zip(layers, self.layout.views(self._raw), strict=True))

    def of(self, layer: int) -> LayerStates:
        """The states of one of the model's layers."""
        return self.layers[layer]
