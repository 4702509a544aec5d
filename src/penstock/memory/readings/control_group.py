"""The control groups that workers put around themselves: their names, and their removal.

A process cannot remove the group it is in, so whoever reaps a worker removes its group. What a
killed server left behind is removed by the next one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.memory.readings.gauge import memory_groups

if TYPE_CHECKING:
    from pathlib import Path

_PREFIX = "penstock-"


def worker_group(parent: Path, pid: int) -> Path:
    """The group of a worker, inside the one it was born in."""
    return parent / f"{_PREFIX}{pid}"


def remove_group(pid: int) -> bool:
    """Remove the group of a worker that has ended; whether it had one."""
    return any(_remove(worker_group(group, pid)) for group, _ in memory_groups())


def oom_kills(pid: int) -> int | None:
    """How often the kernel has killed for want of memory in a worker's group; None: it has none,
    or this kernel does not count."""
    for parent, _ in memory_groups():
        group = worker_group(parent, pid)
        for file in ("memory.events", "memory.oom_control"):  # v2, v1
            try:
                lines = (group / file).read_text().splitlines()
            except OSError:
                continue
            for line in lines:
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return None


def remove_leftovers() -> int:
    """Remove the groups of workers that no longer run; how many."""
    removed = 0
    for group, _ in memory_groups():
        for leftover in group.glob(f"{_PREFIX}*"):
            pid = leftover.name.removeprefix(_PREFIX)
            if pid.isdigit() and not _runs(int(pid)):
                removed += _remove(leftover)
    return removed


def _remove(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:  # none was made, or somebody is in it
        return False
    return True


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
