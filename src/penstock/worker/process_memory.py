"""This process's own RAM, read from the kernel, whatever device it computes on. Only reads."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.memory.readings.gauge import read_process

_PAGE = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")


def resident_bytes() -> tuple[int, int]:
    """All resident pages, and those of files among them."""
    fields = _STATM.read_bytes().split()
    return int(fields[1]) * _PAGE, int(fields[2]) * _PAGE


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
    with the fork server since the fork, hardly changes, so it is read once.
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
            return resident_bytes()[0]
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
