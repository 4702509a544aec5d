"""What KV needs of its device: memory to commit and copies to the host; a backend provides it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from penstock.worker.kv.arena import Arena
    from penstock.worker.kv.offload.host_buffers import HostBuffers

    Pair = tuple[int, int]  # of block and buffer


class Range(Protocol):
    """A stable range of memory of which parts can be committed."""

    def tensor(self) -> Tensor:
        """The whole range as bytes."""

    def commit(self, start: int, size: int, *, touch: bool = True) -> None:
        """Back a part with memory; untouched, it may come only when it is written to."""

    def decommit(self, start: int, size: int) -> None: ...

    def close(self) -> None: ...


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


class HostMemory(Protocol):
    """RAM from which the device copies at full speed."""

    page_bytes: int  # the unit in which it is committed
    pins: bool  # whether that takes long enough to be done beside the steps

    def open_range(self, size: int) -> Range:
        """Reserve addresses; nothing is committed yet."""

    def pin(self, address: int, size: int) -> None:
        """Let the device read and write committed memory; RuntimeError if it cannot."""

    def unpin(self, address: int) -> None:
        """Before it is given back."""


class KvDevice(Protocol):
    """The memory that blocks lie in, and the way between it and the host's."""

    page_bytes: int  # the unit in which memory is committed
    extent_bytes: int  # committed at once, about
    commits_slowly: bool  # so much takes a part of a step's time
    host_memory: HostMemory

    def open_range(self, size: int) -> Range:
        """Reserve addresses on the device; nothing is committed yet."""

    def copies(self, arena: Arena, buffers: HostBuffers, *, out: bool) -> Copies:
        """The way to copy from this arena, or to it."""

    def synchronize(self) -> None:
        """Wait for all steps and copies that have been launched."""
