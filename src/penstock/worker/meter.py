"""What this process holds and how high it went: the worker's readings of its own memory.

RAM is read from the kernel (resident pages and their high-water mark), a GPU from torch's
allocator. Only reads, and gives unused memory back on request; knows no limits.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from penstock.memory.gauge import read_gpus, read_process

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

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


def own_bytes(copied_bytes: int, committed_bytes: int) -> tuple[int, int]:
    """RAM of this process beside KV: all that is private, and what is there beside the weights.

    What is mapped from the model's files is clean and in no private figure that can be relied on;
    the rest of the weights is private memory like any other.
    """
    reading = read_process(os.getpid())
    if reading is None:
        return 0, 0
    beside = max(reading.private_dirty_bytes - copied_bytes - committed_bytes, 0)
    return reading.private_bytes - committed_bytes, beside


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


def copied_bytes(tensors: Iterable[Tensor], folder: Path) -> int:
    """What of these lies in memory of our own, and not in a mapping of one of the folder's files.

    By their addresses: not every page of a mapping has been read by now.
    """
    ranges = _mapped_ranges(folder)
    return sum(
        tensor.nbytes
        for tensor in tensors
        if not any(begin <= tensor.data_ptr() < end for begin, end in ranges)
    )


def _mapped_ranges(folder: Path) -> list[tuple[int, int]]:
    """Where the files in `folder` are mapped."""
    files = {str(file.resolve()) for file in folder.iterdir() if file.is_file()}
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        words = line.split(None, 5)  # range, rights, offset, device, inode, file
        if len(words) == 6 and words[5] in files:
            begin, _, end = words[0].partition("-")
            found.append((int(begin, 16), int(end, 16)))
    return found
