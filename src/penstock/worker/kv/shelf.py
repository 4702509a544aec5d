"""KV blocks between the arena and the disk.

The device thread calls everything here and is the only one that touches the arena. Files are
written from and read into trays, buffers of one block each, by threads of their own: so no thread
but the device's holds an address in the arena, and a disk that hangs holds up nobody.

    arena ──keep──▶ tray ──writer──▶ disk ──reader──▶ tray ──deliver──▶ arena

What is worth reading is decided here, by measured rates: a block that would be computed sooner
than it is read is not asked for. What a key stands for is not known here.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from penstock.tiers import DiskTier, Payload, Quota, Writer
from penstock.worker.kv.identity import content_digest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Protocol

    from penstock.worker.kv.arena import Arena

    class Receiver(Protocol):
        """Who waits for blocks."""

        def place(self, ticket: int) -> int | None:
            """Where the next one belongs; None: it is not wanted any more."""

        def arrived(self, ticket: int, *, more: bool) -> None:
            """It is in its place; without more, none will come."""


log = logging.getLogger(__name__)

# Trays for writing: this much of the grant, but no more.
QUEUE_SHARE = 1 / 32
QUEUE_BYTES = 32 << 20
READ_BYTES = 8 << 20  # of trays for reading, but two at least
FLUSH_S = 3.0
# After so long without a block the disk is taken to hang, and what is awaited is computed.
PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class ShelfSpec:
    """Where KV is kept, how much, and what it is KV of."""

    directory: Path
    quota: Quota
    model: Path  # the folder whose content the KV is a function of
    digests: Path  # where the digests of its files are remembered
    numerics: str  # what else it depends on: types, layout, library versions
    label: str


@dataclass(slots=True)
class _Errand:
    """Blocks to be read for one sequence, in order."""

    ticket: int
    keys: list[bytes]
    dropped: bool = False


class Shelf:
    """One model's KV on disk."""

    def __init__(self, arena: Arena, spec: ShelfSpec, grant_bytes: int) -> None:
        self._arena = arena
        self._size = arena.layout.block_bytes
        writing = max(2, min(QUEUE_BYTES, int(grant_bytes * QUEUE_SHARE)) // self._size)
        # Written to, so that they are in the process's memory before anybody measures it.
        reading = max(2, READ_BYTES // self._size)
        self._trays = torch.full((writing + reading, self._size), 1, dtype=torch.uint8)
        self.tray_bytes = self._trays.numel()
        self._to_write = deque(range(writing))
        self._to_read: queue.SimpleQueue[int] = queue.SimpleQueue()
        for tray in range(writing, writing + reading):
            self._to_read.put(tray)
        self._waiting: deque[bytes] = deque()  # computed, not yet offered to the writer
        self._offered: set[bytes] = set()
        self._errands: dict[int, _Errand] = {}
        self._tickets = 0
        self._asked: queue.SimpleQueue[_Errand] = queue.SimpleQueue()
        self._arrived: deque[tuple[_Errand, int | None]] = deque()
        self._news = threading.Event()
        self._heard_at = time.monotonic()
        self._hung = False  # nothing is asked of the disk until it answers
        self._compute_s: float | None = None  # of a block's tokens, when last measured
        self._tier: DiskTier | None = None
        self._writer: Writer | None = None
        self._reader = threading.Thread(
            target=self._read, args=(spec,), name="kv-reader", daemon=True
        )

    def start(self) -> None:
        """Look at the disk, when nothing is measured any more that a thread would disturb."""
        self._reader.start()

    def keep(self, key: bytes) -> None:
        """A block is known under this key: it is worth saving."""
        if self._tier is not None and not self._tier.contains(key) and key not in self._offered:
            self._waiting.append(key)

    def offer(self, find: Callable[[bytes], int | None]) -> bool:
        """Hand to the writer what there are trays for; whether more is left. `find` knows where
        blocks lie now, and which are gone."""
        while self._waiting and self._to_write and self._writer is not None:
            key = self._waiting.popleft()
            block = find(key)
            if block is None or key in self._offered:
                continue
            tray = self._to_write.popleft()
            self._trays[tray].copy_(self._arena.bytes_of(block))
            self._offered.add(key)
            if not self._writer.offer(key, self._payload(tray), self._release(key, tray)):
                self._offered.discard(key)
                self._to_write.append(tray)
        return bool(self._waiting)

    def covers(self, keys: list[bytes]) -> int:
        """How many of the keys, from the first on, are sooner read than computed."""
        tier = self._tier
        if tier is None or not keys or self._hung:
            return 0
        rate = tier.read_rate.bytes_per_s
        if rate and self._compute_s is not None and self._size / rate > self._compute_s:
            return 0
        return tier.longest_prefix(keys)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step of that many prompt tokens took so long."""
        took = seconds * self._arena.layout.block_tokens / tokens
        self._compute_s = took if self._compute_s is None else (3 * self._compute_s + took) / 4

    def fetch(self, keys: list[bytes]) -> int:
        """Have blocks read, in order; the ticket under which they arrive."""
        if not self._errands:
            self._heard_at = time.monotonic()
        self._tickets += 1
        errand = _Errand(self._tickets, keys)
        self._errands[errand.ticket] = errand
        self._asked.put(errand)
        assert self._tier is not None
        self._tier.touch(keys)
        return errand.ticket

    def drop(self, ticket: int) -> None:
        """What has not arrived under this ticket is of no use any more."""
        errand = self._errands.pop(ticket, None)
        if errand is not None:
            errand.dropped = True

    def deliver(self, receiver: Receiver) -> None:
        """Put what has come since the last call in its place, and say so block by block."""
        self._news.clear()
        while self._arrived:
            errand, tray = self._arrived.popleft()
            self._heard_at, self._hung = time.monotonic(), False
            if tray is None:
                self._end(errand.ticket, receiver)
                continue
            block = None if errand.dropped else receiver.place(errand.ticket)
            if block is not None:
                self._arena.bytes_of(block).copy_(self._trays[tray])
                receiver.arrived(errand.ticket, more=True)
            self._to_read.put(tray)
        if self._errands and time.monotonic() - self._heard_at > PATIENCE_S:
            self._hung = True
            for ticket in list(self._errands):
                self._end(ticket, receiver)

    def wait(self, seconds: float) -> None:
        """Until something arrives."""
        self._news.wait(seconds)

    def stats(self) -> dict[str, float]:
        """Figures of the tier and its writer, for those who watch."""
        if self._tier is None or self._writer is None:
            return {}
        figures = self._tier.stats() | self._writer.stats()
        return {name: float(value or 0) for name, value in figures.items() if name != "problem"}

    def close(self, find: Callable[[bytes], int | None]) -> None:
        """Write what is left, for as long as a shutdown may take."""
        if self._writer is None:
            return
        deadline = time.monotonic() + FLUSH_S
        while self.offer(find) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._writer.flush(max(0.0, deadline - time.monotonic()))
        self._writer.close(0.5)

    def _end(self, ticket: int, receiver: Receiver) -> None:
        if ticket in self._errands:
            self.drop(ticket)
            receiver.arrived(ticket, more=False)

    def _payload(self, tray: int) -> list[Payload]:
        return [Payload("attention", self._trays[tray].numpy().data)]

    def _release(self, key: bytes, tray: int) -> Callable[[object], None]:
        def release(_: object) -> None:
            self._offered.discard(key)
            self._to_write.append(tray)

        return release

    # --- threads ---

    def _read(self, spec: ShelfSpec) -> None:
        try:
            digest = content_digest(spec.model, spec.digests)
        except OSError as error:
            log.warning("KV of %s is not kept on disk: %s", spec.label, error)
            return
        fingerprint = f"{digest} {spec.numerics}"
        tier = DiskTier(spec.directory, spec.quota, fingerprint, label=spec.label)
        # The queue is bounded by the trays.
        self._writer = Writer(tier, self.tray_bytes, lambda event: log.warning("%s", event))
        self._tier = tier
        while True:
            errand = self._asked.get()
            for key in errand.keys:
                tray = self._to_read.get()
                if errand.dropped or not tier.load(key, self._payload(tray)):
                    self._to_read.put(tray)
                    break
                self._arrived.append((errand, tray))
                self._news.set()
            self._arrived.append((errand, None))
            self._news.set()
