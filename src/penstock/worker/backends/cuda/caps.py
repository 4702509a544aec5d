"""The limit of torch's allocator on a GPU."""

from __future__ import annotations

import torch


class CudaCap:
    """The share of the device that torch's allocator may take; the arena is booked apart."""

    control_group: str | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = 0
        self._total = torch.cuda.get_device_properties(device).total_memory

    def set_base(self) -> None:
        self._base = torch.cuda.memory_reserved(self._device)

    def move(self, kv_bytes: int, step_bytes: int) -> None:
        share = min(1.0, (self._base + step_bytes) / self._total)
        torch.cuda.set_per_process_memory_fraction(share, self._device)

    def allow_fragmentation(self, taken_bytes: int) -> int:
        return 0  # its pages are moved to where a step needs them
