"""The way of a block out of the arena: to a buffer, and from there to the disk.

Nobody waits here. What there is no buffer for stays in the arena until there is one, or until it is
given up there; what a disk is too slow for is kept in RAM only, or not at all.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from penstock.worker.kv.hashes import group_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.tiers import Outcome, Writer
    from penstock.worker.kv.device import Copies
    from penstock.worker.kv.offload.host_buffers import HostBuffers

# Copies out of a device that are under way at once.
OUT_BYTES = 2 << 30
# Of the tier in RAM: what waits for the disk cannot be given up for anything else.
_UNWRITTEN_SHARE = 4


class Offload:
    """Blocks that leave; `writer` comes when the disk is ready, if it ever is."""

    def __init__(
        self,
        group: int,
        buffers: HostBuffers,
        copies: Copies,
        write_buffers: int,
        max_waiting: int,
    ) -> None:
        self.writer: Writer | None = None
        self._group = group
        self._buffers = buffers
        self._copies = copies
        self._write_buffers = write_buffers
        self._max_waiting = max_waiting
        # In order of arrival, each block in one of these:
        self._waiting: OrderedDict[bytes, None] = OrderedDict()  # in the arena
        self._since: dict[bytes, int] = {}  # of all of these but the last: when they came, in ns
        self._leaving: dict[bytes, int] = {}  # on the way to its buffer
        self._unwritten: OrderedDict[bytes, int] = OrderedDict()  # in its buffer, to be written
        self._writing: dict[bytes, int] = {}  # in the writer's hands
        self._written: deque[bytes] = deque()  # told by the writer's thread
        self.overtaken = 0  # that were not written because more came than the disk could take

    @property
    def pending(self) -> bool:
        """Something is left to do."""
        return bool(self._waiting or self._leaving or self._unwritten)

    def add(self, key: bytes) -> None:
        """A block is worth saving."""
        self._waiting[key] = None
        self._since.setdefault(key, time.time_ns())
        if len(self._waiting) > self._max_waiting:
            self._forget(next(iter(self._waiting)))

    def _forget(self, key: bytes) -> None:
        del self._waiting[key]
        if key not in self._leaving and key not in self._unwritten:
            self._since.pop(key, None)

    def go_on(self, find: Callable[[bytes], int | None], *, to_disk: bool) -> None:
        """Start what can be started. `find` knows where blocks lie now, and which are gone."""
        self._copies.poll()
        self._collect()
        if keys := self._next(find, self._room(to_disk=to_disk)):
            buffers = self._buffers.take(len(keys))
            blocks = {
                key: block for key in keys[: len(buffers)] if (block := find(key)) is not None
            }
            for key, buffer in zip(blocks, buffers, strict=True):
                del self._waiting[key]
                self._leaving[key] = buffer
            if blocks:
                pairs = list(zip(blocks.values(), buffers, strict=True))
                self._copies.start(
                    pairs, lambda _: self._in_buffers(list(blocks), to_disk), self._copies.mark()
                )
        self._write(to_disk=to_disk)

    def _room(self, *, to_disk: bool) -> int:
        """How many blocks may leave now."""
        most = max(0, OUT_BYTES - self._copies.under_way_bytes) // self._buffers.rows.shape[1]
        if self._buffers.keeps:
            return most
        if self.writer is None or not to_disk:
            return 0
        busy = len(self._leaving) + len(self._unwritten) + len(self._writing)
        return min(most, self._write_buffers - busy)

    def _next(self, find: Callable[[bytes], int | None], most: int) -> list[bytes]:
        """Those whose turn it is; what is gone, or saved by now, is forgotten."""
        chosen: list[bytes] = []
        if most <= 0:
            return chosen
        for key in list(itertools.islice(self._waiting, 2 * most)):
            if find(key) is None or self._is_saved(key):
                self._forget(key)
            else:
                chosen.append(key)
                if len(chosen) == most:
                    break
        return chosen

    def _is_saved(self, key: bytes) -> bool:
        on_its_way = key in self._leaving or key in self._unwritten or key in self._writing
        return on_its_way or self._buffers.cache.find(key) is not None

    def _in_buffers(self, keys: list[bytes], to_disk: bool) -> None:
        """The copies have ended: whoever wants the blocks finds them."""
        cache = self._buffers.cache
        done = []
        for key in keys:
            buffer = self._leaving.pop(key)
            cache.insert(buffer, key)
            if to_disk:
                self._unwritten[key] = buffer
            else:
                done.append(buffer)
                self._since.pop(key, None)
        cache.give(done)

    def _write(self, *, to_disk: bool) -> None:
        """Offer to the writer what it has room for. It holds a buffer until it is written."""
        most = self._write_buffers
        if self._buffers.keeps:
            most = max(most, self._buffers.cache.capacity // _UNWRITTEN_SHARE)
        if self.writer is None and not to_disk:
            most = 0  # there will be none
        while self._unwritten and len(self._writing) < self._write_buffers:
            key = next(iter(self._unwritten))
            buffer = self._unwritten[key]
            if self.writer is None:
                break
            del self._unwritten[key]
            self._writing[key] = buffer
            # A clear since then means this block too.
            since = self._since.pop(key, None)
            payload, name = self._buffers.payload(buffer), group_key(key, self._group)
            if not self.writer.offer(name, payload, self._release(key), since):
                self._buffers.cache.give([self._writing.pop(key)])
        while len(self._unwritten) > most:
            key = next(iter(self._unwritten))
            self._buffers.cache.give([self._unwritten.pop(key)])
            self._since.pop(key, None)
            self.overtaken += 1

    def _release(self, key: bytes) -> Callable[[Outcome], None]:
        return lambda _: self._written.append(key)

    def _collect(self) -> None:
        """Take back what the writer has done with."""
        while self._written:
            self._buffers.cache.give([self._writing.pop(self._written.popleft())])
