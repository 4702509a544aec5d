"""Threads that read blocks from the disk into trays, for whoever sent them on an errand.

A disk that hangs holds up these threads and nobody else: what they read is put in a list, and what
is not wanted any more is not read.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.tiers import DiskTier
from penstock.worker.kv.identity import content_digest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.tiers import Payload, Quota

log = logging.getLogger(__name__)

_CORES_A_THREAD = 4
_MOST_THREADS = 4


def reader_threads() -> int:
    """How many read at once: one reads and checks a good GB a second."""
    return max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // _CORES_A_THREAD))


@dataclass(frozen=True, slots=True)
class ShelfSpec:
    """Where KV is kept on disk, how much, and what it is KV of."""

    directory: Path
    quota: Quota
    model: Path  # the folder whose content the KV is a function of
    digests: Path  # where the digests of its files are remembered
    numerics: str  # what else it depends on: types, layout, library versions
    label: str


@dataclass(slots=True, eq=False)
class Errand:
    """Blocks to be brought to one sequence, in order."""

    ticket: int
    keys: list[bytes]
    after: object  # what the device must have done before their places are free
    since: float
    trays: dict[int, int] = field(default_factory=dict)  # by index: found or read
    read: set[int] = field(default_factory=set)  # indexes that come, or came, from the disk
    end: int = 0  # no block from this index on will come
    started: int = 0  # blocks whose copy has begun
    landed: int = 0  # blocks in their place
    dropped: bool = False


class DiskReader:
    """A model's files, once its identity is known, and the threads that read them."""

    def __init__(
        self, spec: ShelfSpec, payload: Callable[[int], list[Payload]], opened: Callable[[], None]
    ) -> None:
        self.tier: DiskTier | None = None
        self.trays: queue.SimpleQueue[int] = queue.SimpleQueue()  # to read into
        self.arrived: deque[tuple[Errand, int, int | None]] = deque()  # None: could not be read
        self.news = threading.Event()
        self._spec = spec
        self._payload = payload
        self._opened = opened
        self._asked: queue.SimpleQueue[tuple[Errand, int]] = queue.SimpleQueue()
        self.failed = False  # it will not be used
        self._count = reader_threads()

    @property
    def bytes_per_s(self) -> float | None:
        """All threads together; None before the first block."""
        rate = None if self.tier is None else self.tier.read_rate.per_s
        return None if rate is None else rate * self._count

    def start(self) -> None:
        """Look at the disk."""
        self._thread(self._open)

    def ask(self, errand: Errand, index: int) -> None:
        """Have a block read."""
        self._asked.put((errand, index))

    def _thread(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="kv-reader", daemon=True).start()

    def _open(self) -> None:
        spec = self._spec
        try:
            digest = content_digest(spec.model, spec.digests)
        except OSError as error:
            log.warning("KV of %s is not kept on disk: %s", spec.label, error)
            self.failed = True
            return
        fingerprint = f"{digest} {spec.numerics}"
        self.tier = DiskTier(spec.directory, spec.quota, fingerprint, label=spec.label)
        self._opened()
        for _ in range(self._count - 1):
            self._thread(self._read)
        self._read()

    def _read(self) -> None:
        assert self.tier is not None
        while True:
            # First a tray, then what to read into it: otherwise the later blocks of an errand might
            # have all of them, while the one that must come first has none.
            tray: int | None = self.trays.get()
            while tray is not None:
                tray = self._read_next(tray)

    def _read_next(self, tray: int) -> int | None:
        """Read what is asked for next; the tray, if it holds nothing of use."""
        assert self.tier is not None
        errand, index = self._asked.get()
        if errand.dropped or index >= errand.end:
            return tray
        try:
            whole = self.tier.load(errand.keys[index], self._payload(tray))
        except MemoryError:  # of this process, while a step has all of it
            whole = False
        self.arrived.append((errand, index, tray if whole else None))
        self.news.set()
        return None if whole else tray
