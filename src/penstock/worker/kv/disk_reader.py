"""Threads that read blocks from the disk into trays, for whoever sent them on an errand.

A disk that hangs holds up these threads and nobody else: what they read is put in a list, and what
is not wanted any more is not read. Whatever ends one of them ends the use of the disk, and is told.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.memory.gauge import read_ram
from penstock.tiers import DiskTier, Quota

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.tiers import Payload
    from penstock.wire import LoadSpec
    from penstock.worker.kv.identity import ModelFiles

_CORES_A_THREAD = 4
_MOST_THREADS = 4


# A group that has more can keep file pages beside its models, and reads them back faster.
PAGES_SCARCE_BYTES = 16 << 30


def reader_threads() -> int:
    """How many read at once: one reads and checks a good GB a second."""
    return max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // _CORES_A_THREAD))


def short_of_pages() -> bool:
    """Whether a control group leaves us little of the machine's memory: then what pages of files
    take is missing elsewhere. Not meant is the wall that a worker draws around itself later on."""
    ram = read_ram()
    return ram.capacity_bytes < min(ram.physical_bytes, PAGES_SCARCE_BYTES)


@dataclass(frozen=True, slots=True)
class ShelfSpec:
    """Where KV is kept on disk, how much, and what it is KV of."""

    directory: Path
    quota: Quota
    files: ModelFiles  # whose content the KV is a function of
    digests: Path  # where their digests are remembered
    numerics: str  # what else it depends on
    label: str

    @classmethod
    def of(cls, spec: LoadSpec, files: ModelFiles, numerics: str) -> ShelfSpec | None:
        """None where nothing is to be kept on disk."""
        quota = Quota.parse(spec.cache_size)
        if spec.cache_dir is None or spec.profile_dir is None or quota.off:
            return None
        digests = Path(spec.profile_dir) / "digests.json"
        return cls(Path(spec.cache_dir), quota, files, digests, numerics, spec.name)


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
        self,
        spec: ShelfSpec,
        payload: Callable[[int], list[Payload]],
        opened: Callable[[DiskTier], None],
        tell: Callable[[str], None],
    ) -> None:
        self.tier: DiskTier | None = None
        self.trays: queue.SimpleQueue[int] = queue.SimpleQueue()  # to read into
        self.arrived: deque[tuple[Errand, int, int | None]] = deque()  # None: could not be read
        self.news = threading.Event()
        self._spec = spec
        self._payload = payload
        self._opened = opened
        self._tell = tell
        self._asked: queue.SimpleQueue[tuple[Errand, int]] = queue.SimpleQueue()
        self.failed = False  # it will not be used
        self._count = reader_threads()
        self._frugal = short_of_pages()

    @property
    def bytes_per_s(self) -> float | None:
        """All threads together; None before the first block."""
        rate = None if self.tier is None else self.tier.read_rate.per_s
        return None if rate is None else rate * self._count

    def start(self) -> None:
        """Look at the disk."""
        with self._or_without_disk():
            self._thread(self._open)

    def ask(self, errand: Errand, index: int) -> None:
        """Have a block read."""
        self._asked.put((errand, index))

    def _thread(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="kv-reader", daemon=True).start()

    @contextlib.contextmanager
    def _or_without_disk(self) -> Iterator[None]:
        """The edge of a thread: nobody would see it end, and many would wait for it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - no memory, no thread, other files
            self.failed, self.tier = True, None
            reason = str(error) or type(error).__name__
            self._tell(f"KV of {self._spec.label} is not kept on disk: {reason}")

    def _open(self) -> None:
        with self._or_without_disk():
            spec = self._spec
            fingerprint = f"{spec.files.digest(spec.digests)} {spec.numerics}"
            tier = DiskTier(
                spec.directory, spec.quota, fingerprint, label=spec.label, frugal=self._frugal
            )
            self._opened(tier)
            self.tier = tier
            for _ in range(self._count - 1):
                self._thread(lambda: self._read(tier))
            self._read(tier)

    def _read(self, tier: DiskTier) -> None:
        with self._or_without_disk():
            while True:
                # First a tray, then what to read into it: otherwise the later blocks of an errand
                # might have all of them, while the one that must come first has none.
                tray: int | None = self.trays.get()
                while tray is not None:
                    tray = self._read_next(tier, tray)

    def _read_next(self, tier: DiskTier, tray: int) -> int | None:
        """Read what is asked for next; the tray, if it holds nothing of use."""
        errand, index = self._asked.get()
        if errand.dropped or index >= errand.end:
            return tray
        try:
            whole = tier.load(errand.keys[index], self._payload(tray))
        except MemoryError:  # of this process, while a step has all of it
            whole = False
        self.arrived.append((errand, index, tray if whole else None))
        self.news.set()
        return None if whole else tray
