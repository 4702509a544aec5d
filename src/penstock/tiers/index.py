"""Which block files there are, by when they were last used: in memory, for the hot path.

A hint, not the truth: other processes add and remove files meanwhile, and a file is opened to be
used in any case. Makes no system call; safe between threads.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.tiers.format import parse_block_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.tiers.files import Found


@dataclass(slots=True)
class Entry:
    """A block file."""

    size: int
    used_ns: int


@dataclass(slots=True)
class Totals:
    """What one model has."""

    files: int = 0
    bytes: int = 0


class Index:
    """Block files of all models, least recently used first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._totals: dict[str, Totals] = {}  # by model
        self._touched: dict[str, int] = {}  # uses that the files do not show yet
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def replace(self, listing: Iterable[Found]) -> None:
        """Take over what a listing shows; files used since they were last marked stay so."""
        blocks = [f for f in listing if f.regular and parse_block_name(f.name) is not None]
        with self._lock:
            used = {f.name: max(f.modified_ns, self._touched.get(f.name, 0)) for f in blocks}
            blocks.sort(key=lambda found: used[found.name])
            self._entries.clear()
            self._totals.clear()
            for found in blocks:
                self._put(found.name, Entry(found.size, used[found.name]))

    def add(self, name: str, size: int) -> None:
        """A new file, used now."""
        with self._lock:
            self._pop(name)
            self._put(name, Entry(size, time.time_ns()))

    def drop(self, name: str) -> None:
        with self._lock:
            self._pop(name)
            self._touched.pop(name, None)

    def touch(self, names: Sequence[str]) -> None:
        """They are used now, the first as the most recent.

        Names come in the order of a chain, of which the end is worth nothing without the beginning.
        """
        now = time.time_ns()
        with self._lock:
            for name in reversed(names):
                if (entry := self._entries.get(name)) is not None:
                    entry.used_ns = self._touched[name] = now
                    self._entries.move_to_end(name)
                    now += 1

    def used_elsewhere(self, name: str, used_ns: int) -> None:
        """Another process has used it then."""
        with self._lock:
            if (entry := self._entries.get(name)) is not None:
                entry.used_ns = used_ns
                self._entries.move_to_end(name)

    def postpone(self, name: str) -> None:
        """It is the oldest, but cannot be removed: the others first."""
        with self._lock:
            if name in self._entries:
                self._entries.move_to_end(name)

    def oldest(self) -> tuple[str, Entry] | None:
        with self._lock:
            return next(iter(self._entries.items()), None)

    def take_touched(self, most: int) -> list[tuple[str, int]]:
        """Up to so many uses that should be marked on the files."""
        with self._lock:
            names = [name for name, _ in zip(self._touched, range(most), strict=False)]
            return [(name, self._touched.pop(name)) for name in names]

    def totals(self, identity: str) -> Totals:
        """Of one model."""
        with self._lock:
            return replace(self._totals.get(identity, Totals()))

    def _put(self, name: str, entry: Entry) -> None:
        totals = self._totals.setdefault(_model_of(name), Totals())
        totals.files += 1
        totals.bytes += entry.size
        self._entries[name] = entry

    def _pop(self, name: str) -> None:
        if (entry := self._entries.pop(name, None)) is not None:
            totals = self._totals[_model_of(name)]
            totals.files -= 1
            totals.bytes -= entry.size


def _model_of(name: str) -> str:
    return name.partition("-")[0]
