"""Blocks on their way between the arena and trays.

In RAM a copy is made when it is asked for. On a device it goes on beside the steps, on a stream of
its own, and three rules keep the two from meeting:

    a copy out begins when the steps launched before it have ended: they may still write the block
    a copy in begins when those have ended that were launched before its blocks were taken
    a step that would write a block under way waits for the copy (`fence`)

Who waits in each case is the device; the thread that calls this never does, but in `wait`.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.worker.kv.arena import Arena
    from penstock.worker.kv.trays import Trays

    Pair = tuple[int, int]  # of block and tray


class Copies(Protocol):
    """Copies in one direction, which end in the order in which they began."""

    @property
    def under_way_bytes(self) -> int:
        """How much has not ended."""

    def mark(self) -> object:
        """The point that the steps launched so far have to reach."""

    def start(self, pairs: Sequence[Pair], done: Callable[[float], None], after: object) -> None:
        """Copy; `done` is called with the seconds it took, by `poll` or at once."""

    def poll(self) -> None:
        """See what has ended."""

    def wait(self) -> bool:
        """Until the next copy ends; False if there is none."""

    def fence(self, blocks: Iterable[int]) -> bool:
        """Let what is launched from now on find no copy of these blocks under way; whether there
        is one."""


class PlainCopies:
    """Between two places in RAM."""

    under_way_bytes = 0

    def __init__(self, arena: Arena, trays: Trays, *, out: bool) -> None:
        self._arena = arena
        self._trays = trays.rows
        self._out = out

    def mark(self) -> object:
        return None

    def start(self, pairs: Sequence[Pair], done: Callable[[float], None], after: object) -> None:
        for block, tray in pairs:
            place = self._arena.bytes_of(block)
            if self._out:
                self._trays[tray].copy_(place)
            else:
                place.copy_(self._trays[tray])
        done(0.0)

    def poll(self) -> None:
        pass

    def wait(self) -> bool:
        return False

    def fence(self, blocks: Iterable[int]) -> bool:
        return False


@dataclass(slots=True)
class _Batch:
    blocks: frozenset[int]
    size: int
    began: torch.cuda.Event
    ended: torch.cuda.Event
    done: Callable[[float], None]


class DeviceCopies:
    """Between a device and pinned memory, on a stream of their own."""

    def __init__(self, arena: Arena, trays: Trays, *, out: bool) -> None:
        self._arena = arena
        self._trays = trays.rows
        self._extent_trays = trays.memory.extent_trays
        self._out = out
        self._stream = torch.cuda.Stream(arena.device)  # type: ignore[no-untyped-call]
        self._batches: deque[_Batch] = deque()
        self.under_way_bytes = 0

    def mark(self) -> torch.cuda.Event:
        point = _event()
        point.record(torch.cuda.current_stream(self._arena.device))
        return point

    def start(self, pairs: Sequence[Pair], done: Callable[[float], None], after: object) -> None:
        assert isinstance(after, torch.cuda.Event)
        stream, began, ended = self._stream, _event(), _event()
        stream.wait_event(after)
        began.record(stream)
        with torch.cuda.stream(stream):
            for block, tray, count in _runs(pairs, self._extent_trays):
                there = self._arena.rows_of(block, count)
                here = self._trays[tray : tray + count]
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
                torch.cuda.current_stream(self._arena.device).wait_event(batch.ended)
                return True
        return False

    def _end(self) -> None:
        batch = self._batches.popleft()
        self.under_way_bytes -= batch.size
        batch.done(batch.began.elapsed_time(batch.ended) / 1e3)


def copies_for(arena: Arena, trays: Trays, *, out: bool) -> Copies:
    """The way to copy from or to this arena."""
    return (PlainCopies if arena.in_ram else DeviceCopies)(arena, trays, out=out)


def _runs(pairs: Sequence[Pair], extent_trays: int) -> Iterator[tuple[int, int, int]]:
    """Neighbours that stay neighbours are copied as one: (block, tray, how many).

    Not beyond the end of an extent of trays: each is pinned by itself, and CUDA takes no copy from
    two of them.
    """

    def run_of(item: tuple[int, Pair]) -> tuple[int, int, int]:
        place, (block, tray) = item
        return block - place, tray - place, tray // extent_trays

    for _, run in itertools.groupby(enumerate(pairs), run_of):
        found = [pair for _, pair in run]
        yield *found[0], len(found)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
