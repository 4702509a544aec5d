"""The way of a block back: from the disk to a tray, and from a tray to its place in the arena.

A sequence sends an errand for its blocks and waits; others compute meanwhile. Blocks come in order,
each as soon as those before it are on their way.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.tiers.rates import Rate
from penstock.worker.kv.disk_reader import Errand

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Protocol

    from penstock.worker.kv.copies import Copies
    from penstock.worker.kv.disk_reader import DiskReader
    from penstock.worker.kv.trays import Trays

    class Receiver(Protocol):
        """Who waits for blocks."""

        def place(self, ticket: int, index: int) -> int | None:
            """Where one of the blocks belongs; None: it is not wanted any more."""

        def arrived(self, ticket: int, *, more: bool) -> None:
            """The next is in its place; without more, none will come."""


# Copies into a device that are under way at once: a link is never idle while a step is planned.
IN_BYTES = 1 << 30
BATCH_BYTES = 128 << 20
# After so long without a block the disk is taken to hang, and what is awaited is computed.
PATIENCE_S = 5.0
HUNG_S = 60.0  # then it is tried again, even if it has said nothing


class Restoring:
    """Blocks that come back."""

    def __init__(
        self,
        trays: Trays,
        copies: Copies,
        leaving: Copies,
        disk: DiskReader | None,
        read_trays: int,
    ) -> None:
        self.copy_rate = Rate()
        self._hung_at: float | None = None  # when the disk was last found to say nothing
        self.ram_hits = 0
        self.restored_bytes = 0
        self.restored_s = 0.0  # from the errand to its end
        self._trays = trays
        self._size = trays.rows.shape[1]
        self._copies = copies
        self._leaving = leaving  # of other blocks, which may have had these places before
        self._disk = disk
        self._read_trays = read_trays
        self._errands: dict[int, Errand] = {}
        self._tickets = 0
        self._heard_at = 0.0

    def open(self) -> None:
        """Give the reader its trays, of those that are always there: what is read is kept in RAM
        only when it has come to the arena, as all that does."""
        if self._disk is not None:
            for tray in self._trays.take(self._read_trays):
                self._disk.trays.put(tray)
            self._disk.start()

    @property
    def hung(self) -> bool:
        """Whether nothing is asked of the disk: until it answers, or for a while."""
        return self._hung_at is not None and time.monotonic() - self._hung_at < HUNG_S

    def fetch(self, keys: list[bytes]) -> int:
        """Have blocks brought, in order; the ticket under which they arrive."""
        self._tickets += 1
        errand = Errand(self._tickets, keys, self._copies.mark(), time.monotonic(), end=len(keys))
        cache = self._trays.cache
        for index, key in enumerate(keys):
            if (tray := cache.find(key)) is not None:
                cache.share(tray)
                errand.trays[index] = tray
            else:
                errand.read.add(index)
        self.ram_hits += len(errand.trays)
        if errand.read:
            assert self._disk is not None
            if not any(other.read for other in self._errands.values()):
                self._heard_at = time.monotonic()
            for index in sorted(errand.read):
                self._disk.ask(errand, index)
        self._errands[errand.ticket] = errand
        return errand.ticket

    def drop(self, ticket: int) -> None:
        """What has not arrived under this ticket is of no use any more."""
        if (errand := self._errands.pop(ticket, None)) is not None:
            errand.dropped = True
            self._put_back(errand, [i for i in errand.trays if i >= errand.started])

    def deliver(self, receiver: Receiver) -> None:
        """Put what has come since the last call on its way, and say what is in its place."""
        self._copies.poll()
        self._take_read()
        for errand in list(self._errands.values()):
            while self._start(errand, receiver):
                pass
            if errand.landed == errand.end:
                self._end(errand, receiver)
        if self._reads() and time.monotonic() - self._heard_at > PATIENCE_S:
            self._hung_at = time.monotonic()
            for errand in [errand for errand in self._errands.values() if errand.read]:
                self._end(errand, receiver)

    def wait(self, seconds: float) -> None:
        """Until something arrives."""
        if not self._copies.wait() and self._disk is not None and self._reads():
            self._disk.news.wait(seconds)

    def _reads(self) -> bool:
        """Whether anybody waits for the disk."""
        return any(
            index not in errand.trays
            for errand in self._errands.values()
            for index in errand.read
            if errand.landed <= index < errand.end
        )

    def _take_read(self) -> None:
        disk = self._disk
        if disk is None:
            return
        disk.news.clear()
        while disk.arrived:
            errand, index, tray = disk.arrived.popleft()
            self._heard_at, self._hung_at = time.monotonic(), None
            if tray is None:
                errand.end = min(errand.end, index)
                continue
            errand.trays[index] = tray
            if errand.dropped or index >= errand.end:
                self._put_back(errand, [index])

    def _start(self, errand: Errand, receiver: Receiver) -> bool:
        """Begin to copy what is there and next; False if nothing is, or enough is under way."""
        under_way = self._copies.under_way_bytes
        room = min(BATCH_BYTES, IN_BYTES - under_way) // self._size
        most = max(room, 0 if under_way else 1)
        pairs: list[tuple[int, int]] = []
        first = index = errand.started
        while index < errand.end and index in errand.trays and len(pairs) < most:
            if errand.dropped or (block := receiver.place(errand.ticket, index)) is None:
                self.drop(errand.ticket)
                return False
            pairs.append((block, errand.trays[index]))
            index += 1
        if not pairs:
            return False
        errand.started = index
        if self._leaving.fence(block for block, _ in pairs):
            errand.after = self._copies.mark()
        indexes = range(first, index)
        self._copies.start(
            pairs, lambda took_s: self._landed(errand, indexes, took_s, receiver), errand.after
        )
        return True

    def _landed(self, errand: Errand, indexes: range, took_s: float, receiver: Receiver) -> None:
        if took_s:
            self.copy_rate.add(len(indexes) * self._size, took_s)
        self._put_back(errand, indexes)
        for _ in indexes:
            errand.landed += 1
            if not errand.dropped:
                receiver.arrived(errand.ticket, more=True)

    def _put_back(self, errand: Errand, indexes: Iterable[int]) -> None:
        """Trays have been copied from, or will not be."""
        kept = []
        for index in indexes:
            tray = errand.trays.pop(index)
            if index not in errand.read:
                kept.append(tray)
            elif self._disk is not None:
                self._disk.trays.put(tray)
        self._trays.cache.give(kept)

    def _end(self, errand: Errand, receiver: Receiver) -> None:
        if errand.ticket in self._errands:
            self.restored_bytes += errand.landed * self._size
            self.restored_s += time.monotonic() - errand.since
            self.drop(errand.ticket)
            receiver.arrived(errand.ticket, more=False)
