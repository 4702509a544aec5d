"""What this process holds and how high it went: the worker's readings of its own memory.

RAM is read from the kernel (resident pages and their high-water mark), a GPU from torch's
allocator. Only reads, and gives unused memory back on request; knows no limits.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Protocol

import torch

from penstock.memory.gauge import read_gpus, read_process

_PAGE = os.sysconf("SC_PAGE_SIZE")
_LATER_CODE_BYTES = 32 << 20
_STATM = Path("/proc/self/statm")
_libc = ctypes.CDLL(None)


class Meter(Protocol):
    """The memory in which steps are computed."""

    def held(self) -> int:
        """Bytes held now."""

    def mark(self) -> None:
        """Forget how high it went."""

    def peak(self) -> int:
        """The most held since `mark`."""

    def drop_caches(self) -> None:
        """Give freed memory that an allocator keeps back to the system."""


class RamMeter:
    """Resident pages of this process, as the kernel counts them; not those of files.

    Pages of mapped weights come and go as the kernel sees fit, and are booked as weights.
    """

    def held(self) -> int:
        resident, files = _resident_pages()
        return (resident - files) * _PAGE

    def mark(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_bytes(b"5")
        except OSError:
            return  # not this kernel: the peak stays that of the whole life, which errs upwards

    def peak(self) -> int:
        # Of files there is no highest point; what they have now was there, or came in the meantime.
        return kib_field("VmHWM") - _resident_pages()[1] * _PAGE

    def drop_caches(self) -> None:
        if hasattr(_libc, "malloc_trim"):
            _libc.malloc_trim(0)


class CudaMeter:
    """What torch's allocator has taken from the device; the KV arena is not in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def held(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def mark(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def drop_caches(self) -> None:
        torch.cuda.empty_cache()


def meter_for(device: torch.device) -> Meter:
    """The meter of a device's memory."""
    return CudaMeter(device) if device.type == "cuda" else RamMeter()


def _resident_pages() -> tuple[int, int]:
    """All of them, and those of files among them."""
    fields = _STATM.read_bytes().split()
    return int(fields[1]), int(fields[2])


def kib_field(name: str) -> int:
    """A field of this process's status, in bytes; 0 where there is none."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    _, _, rest = text.partition(f"\n{name}:")
    return int(rest.split(None, 1)[0]) << 10 if rest else 0


class PrivateBytes:
    """This process's private memory, read quickly.

    The exact figure walks all page tables. What tells it from the quick one, the pages shared
    with the template since the fork, hardly changes, so it is read once.
    """

    def __init__(self) -> None:
        reading = read_process(os.getpid())
        self._shared = 0 if reading is None else self._resident() - reading.private_bytes

    def read(self) -> int:
        """Bytes that the end of this process would give back."""
        return max(0, self._resident() - self._shared)

    @staticmethod
    def _resident() -> int:
        try:
            return _resident_pages()[0] * _PAGE
        except OSError:
            return 0


def overhead_bytes(copied_bytes: int, committed_bytes: int) -> int:
    """RAM of this process beside weights and KV, wherever the weights are.

    What is mapped from the model's files is clean and in no private figure that can be relied on;
    the rest of the weights is private memory like any other.
    """
    reading = read_process(os.getpid())
    if reading is None:
        return 0
    return max(reading.private_dirty_bytes - copied_bytes - committed_bytes, 0)


def device_overhead_bytes(device: torch.device, known_bytes: int) -> int:
    """What this process holds of a GPU beside `known_bytes`: context, code, libraries' buffers.

    As the driver counts, with some room for code that is brought there at its first use; 0 where
    the driver does not tell.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    for gpu in read_gpus():
        if gpu.index == (device.index or 0) and (held := gpu.processes.get(os.getpid())):
            return max(held - known_bytes, 0) + _LATER_CODE_BYTES
    return 0


def copied_bytes(folder: Path, weight_bytes: int) -> int:
    """The part of the weights that is not mapped from the files in `folder`."""
    return max(weight_bytes - _mapped_bytes(folder), 0)


def _mapped_bytes(folder: Path) -> int:
    """Resident pages of the files in `folder`."""
    files = {str(file.resolve()) for file in folder.iterdir() if file.is_file()}
    total, inside = 0, False
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        words = line.split(None, 5)
        if not words[0].endswith(":"):  # the head of a mapping: range, rights, ..., file
            inside = len(words) == 6 and words[5] in files
        elif inside and words[0] == "Rss:":
            total += int(words[1]) << 10
    return total
