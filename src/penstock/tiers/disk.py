"""One model's blocks in the cache directory: asked for by key, saved from and loaded into memory.

    contains, touch     in memory, for the thread that plans steps
    load                reads; for a helper thread, several at once if wished
    save, refresh       for the writer's thread (`writer.py`)

What `load` returns True for is exactly what was saved under that key by a model of the same
fingerprint. Whatever else is found (short, changed, of another format, model or key) is a miss,
is removed and counted. Which blocks are worth saving, and what a key stands for, is not known here.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.tiers.contents import read_file, write_file
from penstock.tiers.files import READ
from penstock.tiers.format import (
    BadBlock,
    Header,
    Payload,
    block_name,
    block_tag,
    header_size,
    model_digest,
    name_of,
)
from penstock.tiers.pages import Pages
from penstock.tiers.rates import Rate
from penstock.tiers.store import Outcome, Part, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.tiers.files import Files
    from penstock.tiers.quota import Quota


@dataclass(slots=True)
class Counters:
    """What has happened since the tier was opened."""

    hits: int = 0
    misses: int = 0
    bad_removed: int = 0
    read_errors: int = 0
    saved: int = 0
    loaded_bytes: int = 0
    saved_bytes: int = 0


class DiskTier:
    """The blocks of the model with this fingerprint. Opening lists the directory, reads no file.

    A directory that cannot be used is no error here: `problem` says what is wrong, there are no
    hits, and `refresh` tries again.
    """

    def __init__(
        self,
        directory: Path,
        quota: Quota,
        fingerprint: str,
        files: Files | None = None,
        *,
        label: str = "",
        frugal: bool = False,
    ) -> None:
        self.store = Store(directory, quota, files)
        self._pages = Pages(self.store.files, frugal=frugal)
        self.counters = Counters()
        self._counting = threading.Lock()
        self.read_rate = Rate()
        self.write_rate = Rate()
        self.problem: str | None = None
        self._model = model_digest(fingerprint)
        self._label = label  # for people who look at the directory
        self.refresh()

    # --- in memory ---

    def contains(self, key: bytes) -> bool:
        """Whether it is likely there; only `load` can tell."""
        return block_tag(self._model, key) in self.store.index

    def touch(self, keys: Sequence[bytes]) -> None:
        """They were used now; in the order of the chain, so that its end goes first."""
        self.store.index.touch([block_tag(self._model, key) for key in keys])

    # --- on disk ---

    def load(self, key: bytes, into: Sequence[Payload]) -> bool:
        """Read a block into the owner's memory, which holds nothing of use after False."""
        tag = block_tag(self._model, key)
        started = time.perf_counter()
        if tag not in self.store.index or not self._read(tag, key, into):
            self._count(misses=1)
            return False
        size = sum(payload.data.nbytes for payload in into)
        self.read_rate.add(size, time.perf_counter() - started)
        self.store.index.touch([tag])
        self._count(hits=1, loaded_bytes=size)
        return True

    def save(
        self,
        key: bytes,
        payloads: Sequence[Payload],
        *,
        offered_ns: int | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Outcome:
        """Write a block straight from the owner's memory; OSError if the disk will not.

        A clear since `offered_ns` cancels it, and so does `wanted`, which is asked between pieces.
        """
        if self.contains(key):
            return Outcome.PRESENT
        started = time.perf_counter()
        size = header_size(len(key), len(payloads)) + sum(p.data.nbytes for p in payloads)
        part = self.store.reserve(block_name(self._model, key), size, offered_ns or time.time_ns())
        if not isinstance(part, Part):
            return part
        try:
            blank = Header(self._model, key, label=self._label)
            whole = write_file(self.store.files, part.descriptor, blank, payloads, wanted)
            self._pages.done(part.descriptor)
        except Exception:
            self.store.discard(part)
            raise
        if not whole:
            self.store.discard(part)
            return Outcome.CANCELLED
        outcome = self.store.publish(part)
        if outcome is Outcome.SAVED:
            self._pages.saved(part.final_name)
            self.write_rate.add(size, time.perf_counter() - started)
            self._count(saved=1, saved_bytes=size)
        return outcome

    def refresh(self) -> None:
        """See what other processes have done, count anew, come down to the quota."""
        self._pages.drop_saved()
        try:
            self.store.refresh()
            self.problem = None
        except OSError as error:
            self.problem = f"The cache directory {self.store.directory} cannot be used: {error}."

    def stats(self) -> dict[str, Any]:
        """Counters, rates and what this model has there; makes no system call."""
        totals = self.store.index.totals(self._model)
        return asdict(self.counters) | {
            "files": totals.files,
            "bytes": totals.bytes,
            "held_bytes": self.store.held_bytes,
            "quota_bytes": self.store.quota_bytes,
            "evictions": self.store.evictions,
            "evicted_bytes": self.store.evicted_bytes,
            "read_bytes_per_s": self.read_rate.per_s,
            "write_bytes_per_s": self.write_rate.per_s,
            "problem": self.problem,
        }

    def _read(self, tag: bytes, key: bytes, into: Sequence[Payload]) -> bool:
        files, name = self.store.files, name_of(tag)
        try:
            descriptor = files.open(name, READ)
            try:
                read_file(files, descriptor, self._model, key, into)
                self._pages.done(descriptor)
            finally:
                files.close(descriptor)
        except BadBlock:
            self._count(bad_removed=int(self.store.remove(name)))
            return False
        except FileNotFoundError:  # removed by another process
            self.store.index.drop(tag)
            return False
        except OSError:
            # Not the file's fault for certain, so it stays; but it is not asked for again soon.
            self.store.index.drop(tag)
            self._count(read_errors=1)
            return False
        return True

    def _count(self, **amounts: int) -> None:
        with self._counting:
            for name, amount in amounts.items():
                setattr(self.counters, name, getattr(self.counters, name) + amount)
