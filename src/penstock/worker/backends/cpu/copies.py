"""Blocks between the arena and buffers, both in RAM: a copy is made when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.worker.kv.arena import Arena
    from penstock.worker.kv.device import Pair
    from penstock.worker.kv.offload.host_buffers import HostBuffers


class RamCopies:
    """Between two places in RAM."""

    under_way_bytes = 0

    def __init__(self, arena: Arena, buffers: HostBuffers, *, out: bool) -> None:
        self._arena = arena
        self._buffers = buffers.rows
        self._out = out

    def mark(self) -> object:
        return None

    def start(self, pairs: Sequence[Pair], done: Callable[[float], None], after: object) -> None:
        for block, buffer in pairs:
            place = self._arena.bytes_of(block)
            if self._out:
                self._buffers[buffer].copy_(place)
            else:
                place.copy_(self._buffers[buffer])
        done(0.0)

    def poll(self) -> None:
        pass

    def wait(self) -> bool:
        return False

    def fence(self, blocks: Iterable[int]) -> bool:
        return False
