"""What this process holds of a GPU."""

from __future__ import annotations

import os

import torch

from penstock.memory.readings.gauge import read_gpus

_LATER_CODE_BYTES = 32 << 20


class CudaMeter:
    """What torch's allocator has taken from the device; the KV arena is not in it."""

    includes_host = False
    # Torch takes pieces of 20 MiB, and of 2 for small tensors: a step between two that were
    # measured may need one more of them, and what little a step leaves behind may hold another.
    noise_bytes = 44 << 20
    floor_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def held(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def begin_step(self, rows: int) -> None:
        self.mark()

    def mark(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def drop_caches(self) -> None:
        torch.cuda.empty_cache()


def overhead_bytes(device: torch.device, known_bytes: int) -> int:
    """What this process holds of a GPU beside `known_bytes`: context, code, libraries' buffers.

    As the driver counts, with some room for code that is brought there at its first use; 0 where
    the driver does not tell.
    """
    torch.cuda.empty_cache()
    for gpu in read_gpus():
        if gpu.index == (device.index or 0) and (held := gpu.processes.get(os.getpid())):
            return max(held - known_bytes, 0) + _LATER_CODE_BYTES
    return 0
