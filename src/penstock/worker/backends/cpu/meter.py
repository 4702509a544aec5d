"""What steps hold in RAM, as the kernel counts it. Only reads, and gives unused memory back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.heap import trim_heap
from penstock.worker.process_memory import kib_field, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

MANY_ROWS = 49  # fewer have products of their own kind, and leave little behind in the heap


class RamMeter:
    """Resident pages of this process; not those of files, nor those of the KV arena.

    Pages of mapped weights come and go as the kernel sees fit, and are booked as weights.
    """

    includes_host = True
    # What a heap hands out depends a little on what came before, and pages are counted per
    # processor and summed up now and then.
    noise_bytes = 5 << 18
    # The buffer of a product more or less is chance, and half of what a small step takes.
    floor_bytes = 16 << 20

    def __init__(self, kv_bytes: Callable[[], int] = lambda: 0) -> None:
        self._kv_bytes = kv_bytes

    def held(self) -> int:
        resident, files = resident_bytes()
        return resident - files - self._kv_bytes()

    def begin_step(self, rows: int) -> None:
        if rows >= MANY_ROWS:
            self.drop_caches()
        self.mark()

    def mark(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_bytes(b"5")
        except OSError:
            return  # not this kernel: the peak stays that of the whole life, which errs upwards

    def peak(self) -> int:
        # Of files there is no highest point; what they have now was there, or came in the meantime.
        return kib_field("VmHWM") - resident_bytes()[1] - self._kv_bytes()

    def drop_caches(self) -> None:
        trim_heap()
