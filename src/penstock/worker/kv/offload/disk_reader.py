"""Threads that read blocks from the disk into host buffers.

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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.memory.readings.gauge import read_ram
from penstock.tiers import DiskTier, Quota
from penstock.worker.kv.hashes import group_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
class DiskSpec:
    """Where KV is kept on disk, how much, and what it is KV of."""

    directory: Path
    quota: Quota
    files: ModelFiles  # whose content the KV is a function of
    digests: Path  # where their digests are remembered
    numerics: str  # what else it depends on
    label: str

    @classmethod
    def of(cls, spec: LoadSpec, files: ModelFiles, numerics: str) -> DiskSpec | None:
        """None where nothing is to be kept on disk."""
        quota = Quota.parse(spec.cache_size)
        if spec.cache_dir is None or spec.profile_dir is None or quota.off:
            return None
        digests = Path(spec.profile_dir) / "digests.json"
        return cls(Path(spec.cache_dir), quota, files, digests, numerics, spec.name)


@dataclass(slots=True, eq=False)
class FetchRequest:
    """Blocks of one group to be brought to one sequence, in order."""

    fetch_id: int
    keys: list[bytes]
    blocks: list[int]  # where they belong
    after: object  # what the device must have done before their places are free
    since: float
    buffers: dict[int, int] = field(default_factory=dict)  # by index: found or read
    read: set[int] = field(default_factory=set)  # indexes that come, or came, from the disk
    end: int = 0  # no block from this index on will come
    started: int = 0  # blocks whose copy has begun
    landed: int = 0  # blocks in their place
    done: bool = False  # no more will come, or none is wanted


class GroupReads:
    """What is read of one layer group: its buffers, what is asked for and what has come."""

    def __init__(
        self, group: int, payload: Callable[[int], list[Payload]], news: threading.Event
    ) -> None:
        self.group = group
        self.payload = payload
        self.news = news  # something has come, of any group
        self.buffers: queue.SimpleQueue[int] = queue.SimpleQueue()  # to read into
        self.asked: queue.SimpleQueue[tuple[FetchRequest, int]] = queue.SimpleQueue()
        # None: could not be read
        self.arrived: deque[tuple[FetchRequest, int, int | None]] = deque()

    def ask(self, request: FetchRequest, index: int) -> None:
        """Have a block read."""
        self.asked.put((request, index))

    def read_next(self, tier: DiskTier, buffer: int) -> int | None:
        """Read what is asked for next; the buffer, if it holds nothing of use."""
        request, index = self.asked.get()
        if request.done or index >= request.end:
            return buffer
        key = group_key(request.keys[index], self.group)
        try:
            whole = tier.load(key, self.payload(buffer))
        except MemoryError:  # of this process, while a step has all of it
            whole = False
        self.arrived.append((request, index, buffer if whole else None))
        self.news.set()
        return None if whole else buffer


class DiskReader:
    """A model's files, once its identity is known, and the threads that read them."""

    def __init__(
        self,
        spec: DiskSpec,
        payloads: Sequence[Callable[[int], list[Payload]]],
        opened: Callable[[DiskTier], None],
        tell: Callable[[str], None],
    ) -> None:
        """`payloads`: what a buffer of each group has room for."""
        self.tier: DiskTier | None = None
        self.news = threading.Event()
        self.groups = [GroupReads(n, payload, self.news) for n, payload in enumerate(payloads)]
        self._spec = spec
        self._opened = opened
        self._tell = tell
        self.failed = False  # it will not be used
        self._count = max(1, reader_threads() // len(self.groups))  # for each group
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
            groups = self.groups * self._count
            for reads in groups[1:]:
                self._thread(partial(self._read, tier, reads))
            self._read(tier, groups[0])

    def _read(self, tier: DiskTier, reads: GroupReads) -> None:
        with self._or_without_disk():
            while True:
                # First a buffer, then what to read into it: otherwise the later blocks of a request
                # might have all of them, while the one that must come first has none.
                buffer: int | None = reads.buffers.get()
                while buffer is not None:
                    buffer = reads.read_next(tier, buffer)
