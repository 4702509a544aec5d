"""KV blocks between the arena, RAM and the disk.

The device thread calls everything here and is the only one that touches the arena. Files are
written from and read into host buffers, pieces of one block, by threads of their own: so no thread
but the device's holds an address in the arena, and a disk that hangs holds up nobody.

    arena ──offload──▶ buffer ──writer──▶ disk ──reader──▶ buffer ──onload──▶ arena

A buffer keeps what is in it until it is needed for something else. Where the arena is on another
device there are many of them, granted and taken back by the server: that is the tier in RAM. Each
layer group has buffers of its own size, and its share of the tier by the bytes of its tokens.

What is worth bringing back is decided here, by measured rates: a block that would be computed
sooner than it is copied or read is not asked for. What a key stands for is not known here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from penstock.tiers import Writer
from penstock.tiers.rates import Rate
from penstock.worker.kv.hashes import group_key
from penstock.worker.kv.offload.disk_reader import DiskReader, FetchRequest, reader_threads
from penstock.worker.kv.offload.host_buffers import HostBuffers
from penstock.worker.kv.offload.incoming import Onload
from penstock.worker.kv.offload.outgoing import Offload
from penstock.worker.kv.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.tiers import DiskTier, Payload
    from penstock.worker.kv.arena import Arena
    from penstock.worker.kv.device import Copies
    from penstock.worker.kv.groups import LayerGroup
    from penstock.worker.kv.offload.disk_reader import DiskSpec
    from penstock.worker.kv.tier import Fetch, Find

log = logging.getLogger(__name__)

# Host buffers for writes: this share of the grant, at most QUEUE_BYTES.
QUEUE_SHARE = 1 / 32
QUEUE_BYTES = 32 << 20
READ_BYTES = 8 << 20  # of buffers for reading, but two at least for each thread that reads
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


@dataclass(frozen=True, slots=True)
class _GroupOffload:
    """The ways of one layer group's blocks."""

    buffers: HostBuffers
    copies_out: Copies
    copies_in: Copies
    offload: Offload
    onload: Onload


class KvOffload(Tier):
    """One model's KV beside its arenas: on disk if there is a `spec`, in RAM as far as granted."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        arenas: Sequence[Arena],
        spec: DiskSpec | None,
        grant_bytes: int,
        max_tier_bytes: int = 0,
    ) -> None:
        sizes = [group.block_bytes for group in groups]
        self._shares = [size / sum(sizes) for size in sizes]
        # Of a window only the end is fetched.
        full = [group.block_bytes for group in groups if group.needs_all]
        self._token_bytes = sum(full or sizes) / groups[0].block_tokens
        payloads = [partial(self._payload, number) for number in range(len(groups))]
        self._disk = (
            None if spec is None else DiskReader(spec, payloads, self._open_writer, self._tell)
        )
        self._groups: list[_GroupOffload] = []
        for number, arena in enumerate(arenas):
            limits = grant_bytes, int(max_tier_bytes * self._shares[number])
            self._groups.append(self._group(number, arena, *limits))
        self._computing = _ComputeRate()
        self._read_at = self._copied_at = -TRY_AGAIN_S
        self._notices: deque[str] = deque()

    def _group(
        self, number: int, arena: Arena, grant_bytes: int, max_tier_bytes: int
    ) -> _GroupOffload:
        size, share = arena.block_bytes, self._shares[number]
        queue_bytes = int(share * min(QUEUE_BYTES, grant_bytes * QUEUE_SHARE))
        writing = max(2, queue_bytes // size)
        reading = 0
        if self._disk is not None:
            reading = max(2 * reader_threads(), int(READ_BYTES * share) // size)
        buffers = HostBuffers(size, writing + reading, max_tier_bytes, arena.device.host_memory)
        out, back = (arena.device.copies(arena, buffers, out=way) for way in (True, False))
        reads = None if self._disk is None else self._disk.groups[number]
        return _GroupOffload(
            buffers,
            out,
            back,
            Offload(number, buffers, out, writing, arena.blocks),
            Onload(buffers, back, out, reads, reading),
        )

    @property
    def queue_bytes(self) -> int:
        """Of the buffers that are always there."""
        return sum(group.buffers.first_bytes for group in self._groups)

    @property
    def limit_bytes(self) -> int:
        """What the tier in RAM may hold, or still holds."""
        return sum(group.buffers.tier_bytes for group in self._groups)

    def start(self) -> None:
        """Look at the disk, when nothing is measured any more that a thread would disturb."""
        for group in self._groups:
            group.onload.open()
        if self._disk is not None:
            self._disk.start()

    def grant(self, size_bytes: int) -> None:
        """Let the tier in RAM hold so much from now on."""
        for group, share in zip(self._groups, self._shares, strict=True):
            group.buffers.grant(int(size_bytes * share))

    def trim(self) -> None:
        """Give back what was in use when it was to be given back."""
        for group in self._groups:
            group.buffers.trim()

    def keep(self, group: int, key: bytes) -> None:
        """A block is computed: it is worth keeping."""
        mine, tier = self._groups[group], self._disk_tier
        buffered = mine.buffers.cache.find(key) is not None
        on_disk = False
        if tier is not None and not mine.buffers.keeps:
            on_disk = tier.contains(group_key(key, group))
        if not buffered and not on_disk:
            mine.offload.add(key)

    def offer(self, find: Find) -> bool:
        """Save what there is room for; whether more is left to do. `find` knows where blocks lie
        now, and which are gone."""
        to_disk = self._disk is not None and not self._disk.failed and self._disk_pays()
        more = False
        for number, group in enumerate(self._groups):
            group.offload.go_on(partial(find, number), to_disk=to_disk)
            more |= group.offload.pending and (to_disk or group.buffers.keeps)
        return more

    def covers(self, group: int, keys: list[bytes]) -> list[bool]:
        """Which of the blocks are sooner brought than computed."""
        mine, tier = self._groups[group], self._disk_tier
        ram = self._pays(mine.onload.copy_rate.per_s, self._copied_at)
        disk = tier is not None and not mine.onload.hung and self._disk_pays()
        find = mine.buffers.cache.find
        return [
            (ram and find(key) is not None)
            or (disk and tier is not None and tier.contains(group_key(key, group)))
            for key in keys
        ]

    def computed(self, tokens: int, seconds: float) -> None:
        """A step of that many prompt tokens took so long."""
        self._computing.add(tokens, seconds)

    def fetch(self, group: int, keys: list[bytes], blocks: list[int]) -> FetchRequest:
        """Have blocks brought to their places, in order."""
        mine = self._groups[group]
        if (tier := self._disk_tier) is not None:
            tier.touch([group_key(key, group) for key in keys])
            if any(mine.buffers.cache.find(key) is None for key in keys):
                self._read_at = time.monotonic()
        self._copied_at = time.monotonic()
        return mine.onload.fetch(keys, blocks)

    def touch(self, group: int, keys: list[bytes]) -> None:
        """A sequence has used these until now, in the order of its tokens."""
        cache = self._groups[group].buffers.cache
        cache.touch(buffer for key in keys if (buffer := cache.find(key)) is not None)
        if (tier := self._disk_tier) is not None:
            tier.touch([group_key(key, group) for key in keys])

    def drop(self, group: int, fetch: Fetch) -> None:
        """What has not arrived is of no use any more."""
        assert isinstance(fetch, FetchRequest)
        self._groups[group].onload.drop(fetch)

    def deliver(self) -> None:
        """Put what has come since the last call in its place."""
        for group in self._groups:
            group.onload.deliver()

    def wait(self, seconds: float) -> None:
        """Until something arrives."""
        if any(group.copies_in.wait() for group in self._groups) or self._disk is None:
            return
        if any(group.onload.reads for group in self._groups):
            self._disk.news.wait(seconds)

    def fence(self, group: int, blocks: Iterable[int]) -> None:
        """A step is about to write these: it must not meet a copy."""
        mine = self._groups[group]
        if mine.copies_out.under_way_bytes or mine.copies_in.under_way_bytes:
            written = list(blocks)
            mine.copies_out.fence(written)
            mine.copies_in.fence(written)

    def before_moves(self) -> None:
        """Wait for what is under way: blocks are about to move."""
        for group in self._groups:
            while group.copies_in.wait() or group.copies_out.wait():
                pass

    def moved(self, group: int, moves: dict[int, int]) -> None:
        """Blocks have been copied elsewhere: old number to new."""
        self._groups[group].onload.moved(moves)

    def notices(self) -> list[str]:
        """What people should know that has not been told yet."""
        told = []
        while self._notices:
            told.append(self._notices.popleft())
        return told

    def stats(self) -> dict[str, float]:
        """Figures of both tiers, for those who watch."""
        groups = self._groups
        copied = [group.onload.copy_rate.per_s for group in groups]
        slowest = max((group.onload.durations for group in groups), key=lambda took: took.sum_s)
        figures: dict[str, float | None] = {
            "ram_bytes": sum(g.buffers.rows.shape[1] * g.buffers.cache.evictable for g in groups),
            "ram_held_bytes": sum(group.buffers.memory.committed_bytes for group in groups),
            "ram_limit_bytes": self.limit_bytes,
            "ram_hits": sum(group.onload.ram_hits for group in groups),
            "ram_evictions": sum(group.buffers.cache.evicted for group in groups),
            "ram_bytes_per_s": max((rate for rate in copied if rate is not None), default=None),
            "onloaded_bytes": sum(group.onload.onloaded_bytes for group in groups),
            "onload_s": slowest.sum_s,
            **slowest.figures("onload"),
            "overtaken": sum(group.offload.overtaken for group in groups),
            "computed_tokens_per_s": self._computing.per_s,
        }
        if (tier := self._disk_tier) is not None and (writer := self._writer) is not None:
            figures |= tier.stats() | writer.stats()
        return {name: float(value or 0) for name, value in figures.items() if name != "problem"}

    def close(self, find: Find) -> None:
        """Write what is left, for as long as a shutdown may take."""
        if (writer := self._writer) is None:
            return
        deadline = time.monotonic() + FLUSH_S
        while self.offer(find) and time.monotonic() < deadline:
            time.sleep(0.01)
        writer.flush(max(0.0, deadline - time.monotonic()))
        writer.close(0.5)

    @property
    def _disk_tier(self) -> DiskTier | None:
        return None if self._disk is None else self._disk.tier

    @property
    def _writer(self) -> Writer | None:
        return self._groups[0].offload.writer

    def _pays(self, bytes_per_s: float | None, used_at: float) -> bool:
        """Whether onloading a block at this rate is faster than computing it. A rate that was
        measured too long ago, or never, is tried again."""
        tokens_per_s = self._computing.per_s
        old = time.monotonic() - used_at > TRY_AGAIN_S
        if bytes_per_s is None or tokens_per_s is None or old:
            return True
        return self._token_bytes / bytes_per_s < 1 / tokens_per_s

    def _disk_pays(self) -> bool:
        return self._disk is not None and self._pays(self._disk.bytes_per_s, self._read_at)

    def _payload(self, group: int, buffer: int) -> list[Payload]:
        return self._groups[group].buffers.payload(buffer)

    def _open_writer(self, tier: DiskTier) -> None:
        """In the reader's thread, when the disk can be used."""
        # The buffers bound it sooner.
        writer = Writer(tier, self.queue_bytes, self._tell)
        for group in self._groups:
            group.offload.writer = writer

    def _tell(self, words: str) -> None:
        log.warning("%s", words)
        self._notices.append(words)
