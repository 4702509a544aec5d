"""The two caps of a CPU worker, RLIMIT_DATA and a control group; they hold if every book is wrong.

Inner: the operating system refuses an allocation beyond the grant, inside this process, as an error
that the engine catches. Threads must have been started and kernels compiled before: OpenMP and LLVM
abort when they are refused.
Outer: a control group of its own, somewhat wider, in which the kernel kills this worker and
nobody else. Not every system lets one be made.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from typing import TYPE_CHECKING

from penstock.memory.readings.control_group import worker_group
from penstock.memory.readings.gauge import memory_groups
from penstock.worker.process_memory import kib_field

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.worker.backends.meters import Committed

# The outer cap is wider by this: page tables, file pages and kernel memory of the worker are
# charged to the group and not to RLIMIT_DATA.
OUTER_SPARE_BYTES = 64 << 20
OUTER_SPARE_SHARE = 0.10


class RamCap:
    """RLIMIT_DATA: private writable memory. Not RLIMIT_AS, which counts the reserved range too.

    It counts addresses, and a heap keeps those of its holes when their pages are gone. Steps of
    many shapes leave holes that a large tensor does not fit in, so fragmented address space is
    added to the limit: otherwise it would come closer and closer to what is really held. A step
    that then fills all the holes and its whole grant as well is stopped by the outer cap.
    """

    def __init__(self, kv: Committed, outer: OuterCap | None) -> None:
        self._kv = kv
        self._outer = outer
        self.control_group = None if outer is None else str(outer.group)
        self._base = 0
        self._fragmented = 0  # addresses without memory
        self._granted = (0, 0)

    def set_base(self) -> None:
        self._base = kib_field("VmData") - self._kv.committed_bytes
        self._fragmented = 0
        if self._outer is not None:
            self._outer.set_base(self._kv.committed_bytes)

    def move(self, kv_bytes: int, step_bytes: int) -> None:
        self._granted = (kv_bytes, step_bytes)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = self._base + self._fragmented + kv_bytes + step_bytes
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
        if self._outer is not None:
            self._outer.move(kv_bytes + step_bytes)

    def allow_fragmentation(self, taken_bytes: int) -> int:
        before = self._fragmented
        addresses = kib_field("VmData") - self._kv.committed_bytes - self._base
        self._fragmented = max(0, addresses - taken_bytes)
        if self._fragmented != before:
            self.move(*self._granted)
        return self._fragmented - before


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

    def set_base(self, committed_bytes: int) -> None:
        """Everything but KV and steps is in place: what is charged now is the base."""
        self._base = int(self._used.read_text()) - committed_bytes

    def move(self, grant_bytes: int) -> None:
        """Limit the group to a little more than the inner cap."""
        size = self._base + self.mapped_bytes + grant_bytes
        spare = max(OUTER_SPARE_BYTES, int(size * OUTER_SPARE_SHARE))
        try:
            self._limit.write_text(str(size + spare))
        except OSError as error:
            # v1 does not go below what is charged at the moment; the next move tries again.
            if error.errno != errno.EBUSY:
                raise
