"""Blocks on their way between the GPU and buffers.

A copy goes on beside the steps, on a stream of its own, and three rules keep the two from meeting:

    a copy out begins when the steps launched before it have ended: they may still write the block
    a copy in begins when those have ended that were launched before its blocks were taken
    a step that would write a block under way waits for the copy (`fence`)

Who waits in each case is the device; the thread that calls this never does, but in `wait`.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.worker.kv.arena import Arena
    from penstock.worker.kv.device import Pair
    from penstock.worker.kv.offload.host_buffers import HostBuffers


@dataclass(slots=True)
class _Batch:
    blocks: frozenset[int]
    size: int
    began: torch.cuda.Event
    ended: torch.cuda.Event
    done: Callable[[float], None]


class CudaCopies:
    """Between a device and pinned memory, on a stream of their own."""

    def __init__(
        self, device: torch.device, arena: Arena, buffers: HostBuffers, *, out: bool
    ) -> None:
        self._device = device
        self._arena = arena
        self._buffers = buffers.rows
        self._extent_buffers = buffers.memory.extent_buffers
        self._out = out
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._batches: deque[_Batch] = deque()
        self.under_way_bytes = 0

    def mark(self) -> torch.cuda.Event:
        point = _event()
        point.record(torch.cuda.current_stream(self._device))
        return point

    def start(self, pairs: Sequence[Pair], done: Callable[[float], None], after: object) -> None:
        assert isinstance(after, torch.cuda.Event)
        stream, began, ended = self._stream, _event(), _event()
        stream.wait_event(after)
        began.record(stream)
        with torch.cuda.stream(stream):
            for block, buffer, count in _runs(pairs, self._extent_buffers):
                there = self._arena.rows_of(block, count)
                here = self._buffers[buffer : buffer + count]
                (here if self._out else there).copy_(
                    there if self._out else here, non_blocking=True
                )
        ended.record(stream)
        size = len(pairs) * self._arena.layout.block_bytes
        blocks = frozenset(block for block, _ in pairs)
        self._batches.append(_Batch(blocks, size, began, ended, done))
        self.under_way_bytes += size

    def poll(self) -> None:
        while self._batches and self._batches[0].ended.query():  # type: ignore[no-untyped-call]
            self._end()

    def wait(self) -> bool:
        if not self._batches:
            return False
        self._batches[0].ended.synchronize()
        self._end()
        return True

    def fence(self, blocks: Iterable[int]) -> bool:
        if not self._batches:
            return False
        wanted = frozenset(blocks)
        # The last one that matters: those before it end earlier.
        for batch in reversed(self._batches):
            if not batch.blocks.isdisjoint(wanted):
                torch.cuda.current_stream(self._device).wait_event(batch.ended)
                return True
        return False

    def _end(self) -> None:
        batch = self._batches.popleft()
        self.under_way_bytes -= batch.size
        batch.done(batch.began.elapsed_time(batch.ended) / 1e3)


def _runs(pairs: Sequence[Pair], extent_buffers: int) -> Iterator[tuple[int, int, int]]:
    """Neighbours that stay neighbours are copied as one: (block, buffer, how many).

    Not beyond the end of an extent of buffers: each is pinned by itself, CUDA takes no copy from
    two of them.
    """

    def run_of(item: tuple[int, Pair]) -> tuple[int, int, int]:
        place, (block, buffer) = item
        return block - place, buffer - place, buffer // extent_buffers

    for _, run in itertools.groupby(enumerate(pairs), run_of):
        found = [pair for _, pair in run]
        yield *found[0], len(found)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
