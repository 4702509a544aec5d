"""Which block files there are, by when they were last used: in memory, for the hot path.

A hint, not the truth: other processes add and remove files meanwhile, and a file is opened to be
used in any case. Makes no system call; safe between threads. Files go by their tags (`format.py`).

There may be some hundred thousand, of all models and in every worker. So a file is no object here
but two: its tag and a number. A new listing is put in order beside the table in use, since those
who plan steps ask meanwhile; what they change meanwhile is changed in the new table too.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.tiers.format import IDENTITY_BYTES, name_of, parse_block_name, tag_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.tiers.files import Found

    Change = Callable[["_Table"], object]

# A file's number is the time of its last use, and its size in the lower bits.
_SIZE_BITS = 40
_LARGEST = (1 << _SIZE_BITS) - 1
# Sorted at once: nobody else runs meanwhile, as in any one call of the interpreter's own.
_RUN = 2048
# The oldest are looked for so many at once, since a dict steps over all that have left its front.
_CANDIDATES = 256


@dataclass(slots=True)
class Totals:
    """What one model has."""

    files: int = 0
    bytes: int = 0


@dataclass(slots=True)
class _Table:
    """Files by tag, least recently used first, and their sums by model."""

    numbers: dict[bytes, int] = field(default_factory=dict)
    totals: dict[bytes, Totals] = field(default_factory=dict)

    def put(self, tag: bytes, size: int, used_ns: int) -> None:
        """A file that was used after all others."""
        self.pop(tag)
        size = min(size, _LARGEST)
        totals = self.totals.setdefault(tag[:IDENTITY_BYTES], Totals())
        totals.files += 1
        totals.bytes += size
        self.numbers[tag] = used_ns << _SIZE_BITS | size

    def pop(self, tag: bytes) -> None:
        if (number := self.numbers.pop(tag, None)) is not None:
            totals = self.totals[tag[:IDENTITY_BYTES]]
            totals.files -= 1
            totals.bytes -= number & _LARGEST

    def use(self, tag: bytes, used_ns: int) -> bool:
        """It is the last to have been used, if it is there."""
        if (number := self.numbers.pop(tag, None)) is None:
            return False
        self.numbers[tag] = used_ns << _SIZE_BITS | number & _LARGEST
        return True


class Index:
    """Block files of all models, least recently used first."""

    def __init__(self) -> None:
        self._table = _Table()
        self._touched: dict[bytes, int] = {}  # uses that the files do not show yet
        self._candidates: deque[tuple[bytes, int]] = deque()  # the oldest, unless changed since
        self._lock = threading.Lock()  # for a few changes at a time, never for all files
        self._replacing = threading.Lock()
        self._meanwhile: list[Change] | None = None  # while a table is made

    def __contains__(self, tag: bytes) -> bool:
        return tag in self._table.numbers

    def __len__(self) -> int:
        return len(self._table.numbers)

    def replace(self, listing: Iterable[Found]) -> None:
        """Take over what a listing shows; files used since they were last marked stay so."""
        with self._replacing:
            meanwhile: list[Change] = []
            with self._lock:
                self._meanwhile = meanwhile
                touched = {name_of(tag): used_ns for tag, used_ns in self._touched.items()}
            try:
                table = _in_order(listing, touched)
                with self._lock:
                    for change in meanwhile:
                        change(table)
                    old, self._table = self._table, table
                    self._candidates.clear()
            finally:
                self._meanwhile = None
        while old.numbers:  # one by one: freed at once, it would be a pause for all threads
            old.numbers.popitem()

    def add(self, tag: bytes, size: int) -> None:
        """A new file, used now."""
        now = time.time_ns()
        self._change(lambda table: table.put(tag, size, now))

    def drop(self, tag: bytes) -> None:
        def drop(table: _Table) -> None:
            table.pop(tag)
            self._touched.pop(tag, None)

        self._change(drop)

    def touch(self, tags: Sequence[bytes]) -> None:
        """They are used now, the first as the most recent.

        Tags come in the order of a chain, of which the end is worth nothing without the beginning.
        """
        now = time.time_ns()

        def touch(table: _Table) -> None:
            for used_ns, tag in enumerate(reversed(tags), now):
                if table.use(tag, used_ns):
                    self._touched[tag] = used_ns

        self._change(touch)

    def used_elsewhere(self, tag: bytes, used_ns: int) -> None:
        """Another process has used it then."""
        self._change(lambda table: table.use(tag, used_ns))

    def postpone(self, tag: bytes) -> None:
        """It is the oldest, but cannot be removed: the others first."""
        self.used_elsewhere(tag, time.time_ns())

    def oldest(self) -> tuple[bytes, int] | None:
        """The least recently used, and when that was as far as is known here."""
        with self._lock:
            numbers = self._table.numbers
            while numbers:
                while self._candidates:
                    tag, number = self._candidates[0]
                    if numbers.get(tag) == number:
                        return tag, number >> _SIZE_BITS
                    self._candidates.popleft()
                self._candidates.extend(itertools.islice(numbers.items(), _CANDIDATES))
            return None

    def take_touched(self, most: int) -> list[tuple[bytes, int]]:
        """Up to so many uses that should be marked on the files."""
        with self._lock:
            tags = list(itertools.islice(self._touched, most))
            return [(tag, self._touched.pop(tag)) for tag in tags]

    def totals(self, model: bytes) -> Totals:
        """Of one model, by its digest."""
        with self._lock:
            return replace(self._table.totals.get(model[:IDENTITY_BYTES], Totals()))

    def _change(self, change: Change) -> None:
        with self._lock:
            change(self._table)
            if self._meanwhile is not None:
                self._meanwhile.append(change)


def _in_order(listing: Iterable[Found], touched: Mapping[str, int]) -> _Table:
    """The block files of a listing; the latest use of each is on the file or in `touched`."""

    def used_ns(found: Found) -> int:
        return max(found.modified_ns, touched.get(found.name, 0))

    blocks = (f for f in listing if f.regular and parse_block_name(f.name) is not None)
    runs: list[list[Found]] = []
    while run := list(itertools.islice(blocks, _RUN)):
        run.sort(key=used_ns)
        runs.append(run)
    table = _Table()
    for found in heapq.merge(*runs, key=used_ns):
        table.put(tag_of(found.name), found.size, used_ns(found))
    return table
