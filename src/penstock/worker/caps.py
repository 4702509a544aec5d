"""The walls around a worker, which hold even if every book is wrong.

Inner: the operating system (RAM) or torch's allocator (GPU) refuses an allocation beyond the
grant, inside this process, as an error that the engine catches. Threads must have been started
and kernels compiled before: OpenMP and LLVM abort when they are refused.
Outer: a control group of its own, somewhat wider, in which the kernel kills this worker and
nobody else. Not every system lets one be made.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from typing import TYPE_CHECKING, Protocol

import torch

from penstock.memory.control_group import worker_group
from penstock.memory.gauge import memory_groups
from penstock.worker.meter import kib_field

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.worker.kv.arena import Arena

# What torch's CPU allocator and C++ itself say; they have no type of their own in Python.
_EXHAUSTED_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc")

# The outer wall stands this much further out: page tables, file pages and kernel memory of the
# worker are charged to the group and not to the inner wall.
OUTER_SPARE_BYTES = 64 << 20
OUTER_SPARE_SHARE = 0.10


def exhausted(error: BaseException) -> bool:
    """Whether an allocation failed, and nothing worse."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return type(error) is RuntimeError and any(text in str(error) for text in _EXHAUSTED_TEXTS)


class Cap(Protocol):
    """A bound on what this process may hold beyond what it held when that was settled."""

    def settle(self) -> None:
        """What is held now, KV aside, is the base from which grants count."""

    def move(self, kv_bytes: int, step_bytes: int) -> None:
        """Let the arena and the steps have this much from now on."""

    def excuse(self, taken_bytes: int) -> int:
        """Unused memory has been given back and `taken_bytes` are held beyond the base: let nothing
        else count against the grant. By how much the bound has moved."""


class NoCap:
    """Where several engines share a process, as in tests."""

    def settle(self) -> None:
        pass

    def move(self, kv_bytes: int, step_bytes: int) -> None:
        pass

    def excuse(self, taken_bytes: int) -> int:
        return 0


class RamCap:
    """RLIMIT_DATA: private writable memory. Not RLIMIT_AS, which counts the reserved range too.

    It counts addresses, and a heap keeps those of its holes when their pages are gone. Steps of
    many shapes leave holes that a large tensor does not fit in, so they are excused: otherwise the
    wall would stand closer and closer to what is really held. A step that then fills all the holes
    and its whole grant as well is for the outer wall.
    """

    def __init__(self, arena: Arena, outer: OuterCap | None) -> None:
        self._arena = arena
        self._outer = outer
        self._base = 0
        self._holes = 0  # addresses without memory
        self._granted = (0, 0)

    def settle(self) -> None:
        self._base = kib_field("VmData") - self._arena.committed_bytes
        self._holes = 0
        if self._outer is not None:
            self._outer.settle(self._arena.committed_bytes)

    def move(self, kv_bytes: int, step_bytes: int) -> None:
        self._granted = (kv_bytes, step_bytes)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = self._base + self._holes + kv_bytes + step_bytes
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
        if self._outer is not None:
            self._outer.move(kv_bytes + step_bytes)

    def excuse(self, taken_bytes: int) -> int:
        before = self._holes
        addresses = kib_field("VmData") - self._arena.committed_bytes - self._base
        self._holes = max(0, addresses - taken_bytes)
        if self._holes != before:
            self.move(*self._granted)
        return self._holes - before


class CudaCap:
    """The share of the device that torch's allocator may take; the arena is booked apart."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = 0
        self._total = torch.cuda.get_device_properties(device).total_memory

    def settle(self) -> None:
        self._base = torch.cuda.memory_reserved(self._device)

    def move(self, kv_bytes: int, step_bytes: int) -> None:
        share = min(1.0, (self._base + step_bytes) / self._total)
        torch.cuda.set_per_process_memory_fraction(share, self._device)

    def excuse(self, taken_bytes: int) -> int:
        return 0  # its pages are moved to where a step needs them


class OuterCap:
    """A memory control group with only this process in it, inside the group it was born in."""

    def __init__(self, group: Path, limit_file: str, used_file: str) -> None:
        self.group = group
        self._limit = group / limit_file
        self._used = group / used_file
        self._base = 0
        # Of files that this process maps. Read before it came here they are another group's, but
        # those that the kernel drops and brings back are charged to this one.
        self.mapped_bytes = 0

    @classmethod
    def enter(cls) -> OuterCap | None:
        """Make one and move in, without a limit yet; None where the system does not allow it.

        Whoever reaps this process removes the empty group: a process cannot remove its own.
        """
        for born_in, (limit_file, used_file) in memory_groups():
            group = worker_group(born_in, os.getpid())
            try:
                group.mkdir(exist_ok=True)  # left behind by a process that had our number
                if (group / limit_file).exists():
                    (group / "cgroup.procs").write_text(str(os.getpid()))
                    return cls(group, limit_file, used_file)
            except OSError:
                pass
            with contextlib.suppress(OSError):
                group.rmdir()  # a v2 group above us that does not hand memory down
            return None
        return None

    def settle(self, committed_bytes: int) -> None:
        """Everything but KV and steps is in place: what is charged now is the base."""
        self._base = int(self._used.read_text()) - committed_bytes

    def move(self, grant_bytes: int) -> None:
        """Stand a little further out than the inner wall."""
        size = self._base + self.mapped_bytes + grant_bytes
        spare = max(OUTER_SPARE_BYTES, int(size * OUTER_SPARE_SHARE))
        try:
            self._limit.write_text(str(size + spare))
        except OSError as error:
            # v1 does not go below what is charged at the moment; the next move tries again.
            if error.errno != errno.EBUSY:
                raise
