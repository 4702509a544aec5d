"""KV blocks between the arena, RAM and the disk.

The device thread calls everything here and is the only one that touches the arena. Files are
written from and read into trays, host memory in pieces of one block, by threads of their own: so no
thread but the device's holds an address in the arena, and a disk that hangs holds up nobody.

    arena ──saving──▶ tray ──writer──▶ disk ──reader──▶ tray ──restoring──▶ arena

A tray keeps what is in it until it is needed for something else. Where the arena is on another
device there are many of them, granted and taken back by the server: that is the tier in RAM.

What is worth bringing back is decided here, by measured rates: a block that would be computed
sooner than it is copied or read is not asked for. What a key stands for is not known here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from penstock.tiers import Payload, Writer
from penstock.tiers.rates import Rate
from penstock.worker.kv.copies import copies_for
from penstock.worker.kv.disk_reader import DiskReader, reader_threads
from penstock.worker.kv.restoring import Restoring
from penstock.worker.kv.saving import Saving
from penstock.worker.kv.trays import Trays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.tiers import DiskTier
    from penstock.worker.kv.arena import Arena
    from penstock.worker.kv.disk_reader import ShelfSpec
    from penstock.worker.kv.restoring import Receiver

log = logging.getLogger(__name__)

# Trays for writing: this much of the grant, but no more.
QUEUE_SHARE = 1 / 32
QUEUE_BYTES = 32 << 20
READ_BYTES = 8 << 20  # of trays for reading, but two at least for each thread that reads
FLUSH_S = 3.0
# What was found slower than computing is tried again after this: it may have been busy.
TRY_AGAIN_S = 600.0
_RATE_TOKENS = 1 << 15  # computed, after which an older measurement counts half


class _ComputeRate:
    """Prompt tokens a second in the largest steps seen: a small step takes as long as one of many
    more tokens, and says nothing about a long prompt."""

    def __init__(self) -> None:
        self._largest = 0
        self._rate = Rate(_RATE_TOKENS)

    def add(self, tokens: int, seconds: float) -> None:
        if tokens > 2 * self._largest:
            self._rate = Rate(_RATE_TOKENS)
        self._largest = max(self._largest, tokens)
        if 2 * tokens >= self._largest:
            self._rate.add(tokens, seconds)

    @property
    def per_s(self) -> float | None:
        return self._rate.per_s


class Shelf:
    """One model's KV beside its arena: on disk if there is a `spec`, in RAM as far as granted."""

    def __init__(
        self, arena: Arena, spec: ShelfSpec | None, grant_bytes: int, most_tier_bytes: int = 0
    ) -> None:
        self._size = arena.layout.block_bytes
        self._block_tokens = arena.layout.block_tokens
        writing = max(2, min(QUEUE_BYTES, int(grant_bytes * QUEUE_SHARE)) // self._size)
        reading = 0 if spec is None else max(2 * reader_threads(), READ_BYTES // self._size)
        self._trays = Trays(self._size, writing + reading, most_tier_bytes, arena.device)
        self._disk = (
            None if spec is None else DiskReader(spec, self._payload, self._open_writer, self._tell)
        )
        self._out = copies_for(arena, self._trays, out=True)
        self._in = copies_for(arena, self._trays, out=False)
        self._saving = Saving(self._trays, self._out, self._payload, writing, arena.blocks)
        self._restoring = Restoring(self._trays, self._in, self._out, self._disk, reading)
        self._computing = _ComputeRate()
        self._read_at = self._copied_at = -TRY_AGAIN_S
        self._notices: deque[str] = deque()

    @property
    def queue_bytes(self) -> int:
        """Of the trays that are always there."""
        return self._trays.first_bytes

    @property
    def tier_bytes(self) -> int:
        """What the tier in RAM may hold."""
        return self._trays.tier_bytes

    def start(self) -> None:
        """Look at the disk, when nothing is measured any more that a thread would disturb."""
        self._restoring.open()

    def grant(self, tier_bytes: int) -> None:
        """Let the tier in RAM hold so much from now on."""
        self._trays.grant(tier_bytes)

    def trim(self) -> None:
        """Give back what was in use when it was to be given back."""
        self._trays.trim()

    def keep(self, key: bytes) -> None:
        """A block is known under this key: it is worth saving."""
        in_ram = self._trays.cache.find(key) is not None
        tier = self._disk_tier
        on_disk = not self._trays.keeps and tier is not None and tier.contains(key)
        if not in_ram and not on_disk:
            self._saving.add(key)

    def offer(self, find: Callable[[bytes], int | None]) -> bool:
        """Save what there is room for; whether more is left to do. `find` knows where blocks lie
        now, and which are gone."""
        to_disk = self._disk is not None and not self._disk.failed and self._disk_pays()
        self._saving.go_on(find, to_disk=to_disk)
        return self._saving.pending and (to_disk or self._trays.keeps)

    def covers(self, keys: list[bytes]) -> int:
        """How many of the keys, from the first on, are sooner brought than computed."""
        find, tier = self._trays.cache.find, self._disk_tier
        ram = self._pays(self._restoring.copy_rate.per_s, self._copied_at)
        disk = tier is not None and not self._restoring.hung and self._disk_pays()
        for count, key in enumerate(keys):
            in_ram = ram and find(key) is not None
            if not in_ram and not (disk and tier is not None and tier.contains(key)):
                return count
        return len(keys)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step of that many prompt tokens took so long."""
        self._computing.add(tokens, seconds)

    def fetch(self, keys: list[bytes]) -> int:
        """Have blocks brought, in order; the ticket under which they arrive."""
        if (tier := self._disk_tier) is not None:
            tier.touch(keys)
            if any(self._trays.cache.find(key) is None for key in keys):
                self._read_at = time.monotonic()
        self._copied_at = time.monotonic()
        return self._restoring.fetch(keys)

    def touch(self, keys: list[bytes]) -> None:
        """A sequence has used these until now, in the order of its chain."""
        cache = self._trays.cache
        cache.touch(tray for key in keys if (tray := cache.find(key)) is not None)
        if (tier := self._disk_tier) is not None:
            tier.touch(keys)

    def drop(self, ticket: int) -> None:
        """What has not arrived under this ticket is of no use any more."""
        self._restoring.drop(ticket)

    def deliver(self, receiver: Receiver) -> None:
        """Put what has come since the last call in its place, and say so block by block."""
        self._restoring.deliver(receiver)

    def wait(self, seconds: float) -> None:
        """Until something arrives."""
        self._restoring.wait(seconds)

    def fence(self, blocks: Iterable[int]) -> None:
        """A step is about to write these: it must not meet a copy."""
        if self._out.under_way_bytes or self._in.under_way_bytes:
            written = list(blocks)
            self._out.fence(written)
            self._in.fence(written)

    def settle(self) -> None:
        """Wait for what is under way: blocks are about to move."""
        while self._in.wait() or self._out.wait():
            pass

    def notices(self) -> list[str]:
        """What people should know that has not been told yet."""
        told = []
        while self._notices:
            told.append(self._notices.popleft())
        return told

    def stats(self) -> dict[str, float]:
        """Figures of both tiers, for those who watch."""
        cache = self._trays.cache
        figures: dict[str, float | None] = {
            "ram_bytes": self._size * cache.kept,
            "ram_held_bytes": self._trays.memory.committed_bytes,
            "ram_limit_bytes": self.tier_bytes,
            "ram_hits": self._restoring.ram_hits,
            "ram_evictions": cache.evicted,
            "ram_bytes_per_s": self._restoring.copy_rate.per_s,
            "restored_bytes": self._restoring.restored_bytes,
            "restored_s": self._restoring.restored_s,
            "overtaken": self._saving.overtaken,
            "computed_tokens_per_s": self._computing.per_s,
        }
        if (tier := self._disk_tier) is not None and self._saving.writer is not None:
            figures |= tier.stats() | self._saving.writer.stats()
        return {name: float(value or 0) for name, value in figures.items() if name != "problem"}

    def close(self, find: Callable[[bytes], int | None]) -> None:
        """Write what is left, for as long as a shutdown may take."""
        writer = self._saving.writer
        if writer is None:
            return
        deadline = time.monotonic() + FLUSH_S
        while self.offer(find) and time.monotonic() < deadline:
            time.sleep(0.01)
        writer.flush(max(0.0, deadline - time.monotonic()))
        writer.close(0.5)

    @property
    def _disk_tier(self) -> DiskTier | None:
        return None if self._disk is None else self._disk.tier

    def _pays(self, bytes_per_s: float | None, used_at: float) -> bool:
        """Whether a block comes sooner at this rate, last measured then, than by computing; what is
        not known any more, does."""
        tokens_per_s = self._computing.per_s
        old = time.monotonic() - used_at > TRY_AGAIN_S
        if bytes_per_s is None or tokens_per_s is None or old:
            return True
        return self._size / bytes_per_s < self._block_tokens / tokens_per_s

    def _disk_pays(self) -> bool:
        return self._disk is not None and self._pays(self._disk.bytes_per_s, self._read_at)

    def _payload(self, tray: int) -> list[Payload]:
        return [Payload("attention", self._trays.rows[tray].numpy().data)]

    def _open_writer(self, tier: DiskTier) -> None:
        """In the reader's thread, when the disk can be used."""
        limit = self.queue_bytes  # the trays bound it sooner
        self._saving.writer = Writer(tier, limit, self._tell)

    def _tell(self, words: str) -> None:
        log.warning("%s", words)
        self._notices.append(words)
