"""Host memory in pieces of one block, through which KV leaves a device and comes back.

Some buffers are there from the beginning: what is on its way to or from a disk needs them. Where KV
lies on another device there may be many more, and these are the tier in RAM: memory that the device
copies from at full speed, pinned piece by piece in a thread of its own, since that takes a tenth
of a second for some hundred MiB. Which block lies in which buffer is a `PrefixCache`'s to know.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from penstock.tiers import Payload
from penstock.worker.kv.blocks import BlockPool
from penstock.worker.kv.prefix import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from penstock.worker.kv.device import HostMemory

log = logging.getLogger(__name__)

EXTENT_BYTES = 64 << 20
AHEAD_BYTES = 2 << 30  # pinned before it is needed, since a long prompt is quicker than that
_PIN_AGAIN_S = 30.0  # after memory could not be pinned


class NotYet(Exception):  # noqa: N818 - named for what is the case
    """Memory that will be there in a moment."""


class BufferMemory:
    """The `Backing` of a pool of buffers: the first extent at once, others when they are pinned."""

    def __init__(self, buffer_bytes: int, first: int, max_bytes: int, host: HostMemory) -> None:
        self._host = host
        # Extents are whole pages, so that each is committed and returned alone.
        page = host.page_bytes
        unit = page // math.gcd(page, buffer_bytes) if max_bytes else 1
        least = max(first, min(EXTENT_BYTES, max_bytes) // buffer_bytes)
        self.extent_buffers = -(-least // unit) * unit
        self.extent_bytes = self.extent_buffers * buffer_bytes
        self.extents = 1 + max_bytes // self.extent_bytes
        size = self.extents * self.extent_bytes
        self._range = host.open_range(-(-size // page) * page)
        self.rows: Tensor = self._range.tensor()[:size].view(-1, buffer_bytes)
        self.pinned: set[int] = set()  # extents that are held
        self._coming: threading.Thread | None = None
        self._wanted: deque[int] = deque()
        self._not_before = 0.0

    @property
    def committed_bytes(self) -> int:
        """Memory that is held, beyond the first extent."""
        return max(0, len(self.pinned) - 1) * self.extent_bytes

    def commit(self, extent: int) -> None:
        """Raises `NotYet` while a further extent is being pinned."""
        if extent in self.pinned:
            return
        if extent and self._host.pins:
            raise NotYet
        self._prepare(extent)

    def ask(self, extents: Sequence[int]) -> bool:
        """Have extents pinned, in this order; False if there are none, or that has just failed."""
        if not self._host.pins or not extents:
            return False
        missing = [extent for extent in extents if extent not in self.pinned]
        if missing and not self._pinning():
            if time.monotonic() < self._not_before:
                return False
            self._wanted.extend(missing)
            self._coming = threading.Thread(target=self._pin, name="kv-pin", daemon=True)
            self._coming.start()
        return True

    def decommit(self, extent: int) -> None:
        """Give an extent's memory back; nothing is on its way from or to it."""
        self.pinned.remove(extent)
        start = extent * self.extent_bytes
        self._host.unpin(self.rows.data_ptr() + start)
        self._range.decommit(start, self.extent_bytes)

    def _pinning(self) -> bool:
        return self._coming is not None and self._coming.is_alive()

    def finish(self) -> None:
        """Pin no more than has been begun, and wait for that."""
        self._wanted.clear()
        if self._coming is not None:
            self._coming.join()

    def _pin(self) -> None:
        try:
            while self._wanted:
                extent = self._wanted.popleft()
                if extent not in self.pinned:
                    self._prepare(extent)
        except IndexError:
            return  # it is not wanted any more
        except (MemoryError, OSError, RuntimeError) as error:
            self._wanted.clear()
            self._not_before = time.monotonic() + _PIN_AGAIN_S
            log.warning(
                "%d MiB of RAM for KV could not be pinned (%s); what is there is used",
                self.extent_bytes >> 20,
                error,
            )

    def _prepare(self, extent: int) -> None:
        start = extent * self.extent_bytes
        # Touched, so that it is in the process's memory before anybody measures that.
        self._range.commit(start, self.extent_bytes)
        try:
            self._host.pin(self.rows.data_ptr() + start, self.extent_bytes)
        except RuntimeError:
            self._range.decommit(start, self.extent_bytes)
            raise
        self.pinned.add(extent)


class HostBuffers:
    """Who uses which buffer, and what is in the others. Called by the device thread alone."""

    def __init__(self, buffer_bytes: int, first: int, max_bytes: int, host: HostMemory) -> None:
        self.memory = BufferMemory(buffer_bytes, first, max_bytes, host)
        self._extent = self.memory.extent_buffers
        pool = BlockPool(
            self.memory.extents * self._extent, self._extent, self.memory, reserved=False
        )
        self._pool = pool
        self.cache = PrefixCache(pool)
        self._pool.set_limit(self._extent)
        self._granted = 0

    @property
    def rows(self) -> Tensor:
        """[buffers, bytes]."""
        return self.memory.rows

    def payload(self, buffer: int) -> list[Payload]:
        """A buffer as the disk sees it."""
        return [Payload("attention", self.rows[buffer].numpy().data)]

    @property
    def first_bytes(self) -> int:
        """Of the buffers that are always there."""
        return self.memory.extent_bytes

    @property
    def tier_bytes(self) -> int:
        """What all others may hold, or hold for a little longer."""
        return max(self._granted, self.memory.committed_bytes)

    @property
    def keeps(self) -> bool:
        """Whether there are others."""
        return self.cache.capacity > self._extent

    def take(self, count: int) -> list[int]:
        """So many buffers, or as many as can be had now; what was in them is evicted."""
        count = min(count, self.cache.free)
        try:
            taken = self.cache.take(count)
        except NotYet:
            taken = self.cache.take(min(count, self._pool.ready))
        missing = count - len(taken)
        if not self._pin_ahead(missing):
            taken += self.cache.recycle(missing)
        return taken

    def _pin_ahead(self, missing: int) -> bool:
        """Have what is missing pinned, and some more; whether any will be there in a moment."""
        buffer_bytes = self.rows.shape[1]
        wanted = AHEAD_BYTES + (missing - self._pool.ready) * buffer_bytes
        allowed = self._pool.capacity // self._extent - self._pool.committed
        count = max(0, min(-(-wanted // self.memory.extent_bytes), allowed))
        return self.memory.ask(self._pool.unbacked[:count])

    def trim(self) -> None:
        """Give back what could not be given when it was asked for."""
        self.grant(self._granted)

    def grant(self, tier_bytes: int) -> None:
        """Hold so much beside the first buffers from now on, as far as copies under way allow."""
        self._granted = tier_bytes
        allowed = 1 + tier_bytes // self.memory.extent_bytes
        shrinks = allowed * self._extent < self._pool.capacity
        self._pool.set_limit(allowed * self._extent)
        if shrinks:
            self.memory.finish()
        if len(self.memory.pinned) <= allowed:
            return
        for extent in self.memory.pinned.difference(self._pool.backed):
            self.memory.decommit(extent)  # it came too late
        # HostBuffers are filled one after the other: what lies together is about as old.
        latest = {
            buffer // self._extent: age for age, buffer in enumerate(self.cache.evictable_blocks())
        }
        in_use = {buffer // self._extent for buffer in self.cache.held_blocks()} | {0}
        others = [extent for extent in self._pool.backed if extent not in in_use]
        oldest = sorted(others, key=lambda extent: latest.get(extent, -1))
        for extent in oldest[: max(0, self._pool.committed - allowed)]:
            self.cache.evict(range(extent * self._extent, (extent + 1) * self._extent))
        self.cache.shrink()
        self._pool.return_empty_extents()
