"""Which block files there are, by when they were last used: in memory, for the hot path.

A hint, not the truth: other processes add and remove files meanwhile, and a file is opened to be
used in any case. Makes no system call; safe between threads.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
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


class Index:
    """Block files of all models, least recently used first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Entry] = OrderedDict()
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
            self._entries = OrderedDict((f.name, Entry(f.size, used[f.name])) for f in blocks)

    def add(self, name: str, size: int) -> None:
        with self._lock:
            self._entries[name] = Entry(size, time.time_ns())
            self._entries.move_to_end(name)

    def drop(self, name: str) -> None:
        with self._lock:
            self._entries.pop(name, None)
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

    def totals(self, identity: str) -> tuple[int, int]:
        """(files, bytes) of one model."""
        with self._lock:
            sizes = [e.size for name, e in self._entries.items() if name.startswith(identity)]
        return len(sizes), sum(sizes)
