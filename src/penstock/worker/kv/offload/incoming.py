"""The way of a block back: from the disk to a host buffer, from there to its place in the arena.

A sequence waits for the blocks that were fetched for it; others compute meanwhile. Blocks come in
order, each as soon as those before it are on their way.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.tiers.rates import Durations, Rate
from penstock.worker.kv.offload.disk_reader import FetchRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.worker.kv.device import Copies
    from penstock.worker.kv.offload.disk_reader import GroupReads
    from penstock.worker.kv.offload.host_buffers import HostBuffers


# Copies into a device that are under way at once: a link is never idle while a step is planned.
IN_BYTES = 1 << 30
BATCH_BYTES = 128 << 20
# After so long without a block the disk is taken to hang, and what is awaited is computed.
PATIENCE_S = 5.0
HUNG_S = 60.0  # then it is tried again, even if it has said nothing


class Onload:
    """Blocks that come back."""

    def __init__(
        self,
        buffers: HostBuffers,
        copies: Copies,
        leaving: Copies,
        disk: GroupReads | None,
        read_buffers: int,
    ) -> None:
        self.copy_rate = Rate()
        self._hung_at: float | None = None  # when the disk was last found to say nothing
        self.ram_hits = 0
        self.onloaded_bytes = 0
        self.durations = Durations()  # from the request to its end
        self._buffers = buffers
        self._size = buffers.rows.shape[1]
        self._copies = copies
        self._leaving = leaving  # of other blocks, which may have had these places before
        self._disk = disk
        self._read_buffers = read_buffers
        self._fetches: dict[int, FetchRequest] = {}
        self._last_id = 0
        self._heard_at = 0.0

    def open(self) -> None:
        """Give the reader its buffers, of those that are always there: what is read is kept in RAM
        only when it has come to the arena, as all that does."""
        if self._disk is not None:
            for buffer in self._buffers.take(self._read_buffers):
                self._disk.buffers.put(buffer)

    @property
    def hung(self) -> bool:
        """Whether nothing is asked of the disk: until it answers, or for a while."""
        return self._hung_at is not None and time.monotonic() - self._hung_at < HUNG_S

    def fetch(self, keys: list[bytes], blocks: list[int]) -> FetchRequest:
        """Have blocks brought to their places, in order."""
        self._last_id += 1
        request = FetchRequest(
            self._last_id, keys, blocks, self._copies.mark(), time.monotonic(), end=len(keys)
        )
        cache = self._buffers.cache
        for index, key in enumerate(keys):
            if (buffer := cache.find(key)) is not None:
                cache.share(buffer)
                request.buffers[index] = buffer
            else:
                request.read.add(index)
        self.ram_hits += len(request.buffers)
        if request.read:
            assert self._disk is not None
            if not any(other.read for other in self._fetches.values()):
                self._heard_at = time.monotonic()
            for index in sorted(request.read):
                self._disk.ask(request, index)
        self._fetches[request.fetch_id] = request
        return request

    def drop(self, request: FetchRequest) -> None:
        """What has not arrived is of no use any more."""
        if self._fetches.pop(request.fetch_id, None) is not None:
            request.done = True
            self._put_back(request, [i for i in request.buffers if i >= request.started])

    def moved(self, moves: dict[int, int]) -> None:
        """Blocks have been copied elsewhere, and no copy is under way."""
        for request in self._fetches.values():
            request.blocks = [moves.get(block, block) for block in request.blocks]

    def deliver(self) -> None:
        """Put what has come since the last call on its way; what is in its place shows in the
        requests."""
        self._copies.poll()
        self._take_read()
        for request in list(self._fetches.values()):
            while self._start(request):
                pass
            if request.landed == request.end:
                self._end(request)
        if self.reads and time.monotonic() - self._heard_at > PATIENCE_S:
            self._hung_at = time.monotonic()
            for request in [request for request in self._fetches.values() if request.read]:
                self._end(request)

    @property
    def reads(self) -> bool:
        """Whether anybody waits for the disk."""
        return any(
            index not in request.buffers
            for request in self._fetches.values()
            for index in request.read
            if request.landed <= index < request.end
        )

    def _take_read(self) -> None:
        disk = self._disk
        if disk is None:
            return
        disk.news.clear()
        while disk.arrived:
            request, index, buffer = disk.arrived.popleft()
            self._heard_at, self._hung_at = time.monotonic(), None
            if buffer is None:
                request.end = min(request.end, index)
                continue
            request.buffers[index] = buffer
            if request.done or index >= request.end:
                self._put_back(request, [index])

    def _start(self, request: FetchRequest) -> bool:
        """Begin to copy what is there and next; False if nothing is, or enough is under way."""
        under_way = self._copies.under_way_bytes
        room = min(BATCH_BYTES, IN_BYTES - under_way) // self._size
        most = max(room, 0 if under_way else 1)
        pairs: list[tuple[int, int]] = []
        first = index = request.started
        while index < request.end and index in request.buffers and len(pairs) < most:
            pairs.append((request.blocks[index], request.buffers[index]))
            index += 1
        if not pairs:
            return False
        request.started = index
        if self._leaving.fence(block for block, _ in pairs):
            request.after = self._copies.mark()
        indexes = range(first, index)
        self._copies.start(
            pairs, lambda took_s: self._landed(request, indexes, took_s), request.after
        )
        return True

    def _landed(self, request: FetchRequest, indexes: range, took_s: float) -> None:
        if took_s:
            self.copy_rate.add(len(indexes) * self._size, took_s)
        self._put_back(request, indexes)
        request.landed += len(indexes)

    def _put_back(self, request: FetchRequest, indexes: Iterable[int]) -> None:
        """HostBuffers have been copied from, or will not be."""
        kept = []
        for index in indexes:
            buffer = request.buffers.pop(index)
            if index not in request.read:
                kept.append(buffer)
            elif self._disk is not None:
                self._disk.buffers.put(buffer)
        self._buffers.cache.give(kept)

    def _end(self, request: FetchRequest) -> None:
        if request.fetch_id in self._fetches:
            self.onloaded_bytes += request.landed * self._size
            self.durations.add(time.monotonic() - request.since)
            self.drop(request)
