"""A memory control group around a process tree: an independent witness, and a wall if need be.

Made inside the group that this process is in, v1 or v2. It says how high the tree went, whether
the kernel had to act, and who is inside. Knows nothing of what runs in it.
"""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.memory.readings.gauge import memory_groups, read_process

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

_numbers = itertools.count(1)
_REMOVE_S = 10.0


class NoCage(Exception):  # noqa: N818 - a reason to skip, not a failure
    """No memory control group can be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class Inside:
    """What the tree holds at one moment."""

    unbacked_bytes: int  # anonymous and shared memory, each page once
    mapped_bytes: int  # of the files asked for
    processes: dict[int, int]  # unbacked bytes by process id

    @property
    def total_bytes(self) -> int:
        """Both."""
        return self.unbacked_bytes + self.mapped_bytes


class Cage:
    """A group with a limit; a context manager that removes it at the end."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._group, self._v2 = _make(limit_bytes)

    def command(self, command: Sequence[str]) -> list[str]:
        """The command with a step before it that moves the process in."""
        procs = shlex.quote(str(self._group / "cgroup.procs"))
        return ["/bin/sh", "-c", f'echo $$ > {procs} && exec "$@"', "caged", *command]

    def processes(self) -> list[int]:
        """Everyone inside, also in groups that they made for themselves."""
        found: list[int] = []
        for group in self._groups():
            try:
                found += map(int, (group / "cgroup.procs").read_text().split())
            except OSError:  # removed meanwhile
                continue
        return found

    def inside(self, mapped: Path | None = None) -> Inside:
        """What the tree holds now; `mapped` is a folder whose mapped files count too."""
        sizes: dict[int, int] = {}
        files = 0
        for pid in self.processes():
            if (reading := read_process(pid)) is not None:
                sizes[pid] = reading.unbacked_bytes
                files = max(files, mapped_bytes(pid, mapped) if mapped is not None else 0)
        return Inside(sum(sizes.values()), files, sizes)

    def pushed(self) -> int:
        """How often the tree ran into the limit, whatever came of it."""
        if self._v2:
            return _field(self._group / "memory.events", "max")
        return int((self._group / "memory.failcnt").read_text())

    def kills(self) -> int:
        """How many processes the kernel has killed for it."""
        file = "memory.events" if self._v2 else "memory.oom_control"
        return sum(_field(group / file, "oom_kill") for group in self._groups())

    def highest_bytes(self) -> int:
        """The most that was ever charged, file pages that can be dropped included."""
        file = "memory.peak" if self._v2 else "memory.max_usage_in_bytes"
        return int((self._group / file).read_text())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        deadline = time.monotonic() + _REMOVE_S
        while self._group.exists():
            for group in reversed(list(self._groups())):
                try:
                    group.rmdir()
                except OSError:
                    assert time.monotonic() < deadline, f"still in {group}: {self.processes()}"
                    time.sleep(0.05)

    def _groups(self) -> Iterator[Path]:
        for folder, _, _ in os.walk(self._group):
            yield self._group / folder


def _make(limit_bytes: int) -> tuple[Path, bool]:
    if not sys.platform.startswith("linux"):
        raise NoCage(f"{sys.platform} has no control groups")
    for born_in, (limit_file, _) in memory_groups():
        v2 = limit_file == "memory.max"
        group = born_in / f"cage-{os.getpid()}-{next(_numbers)}"
        try:
            group.mkdir()
        except OSError as error:
            raise NoCage(f"no control group can be made in {born_in}: {error}") from None
        try:
            (group / limit_file).write_text(str(limit_bytes))
        except OSError as error:
            group.rmdir()
            raise NoCage(f"{born_in} does not hand memory down: {error}") from None
        return group, v2
    raise NoCage("there is no memory control group here")


def mapped_bytes(pid: int, folder: Path) -> int:
    """ModelUsage pages of a process that are mapped from files in `folder`."""
    prefix, total, counted = str(folder.resolve()), 0, False
    try:
        with open(f"/proc/{pid}/maps") as maps:  # noqa: PTH123 - not a file of ours
            if prefix not in maps.read():
                return 0
        with open(f"/proc/{pid}/smaps") as smaps:  # noqa: PTH123
            for line in smaps:
                words = line.split(None, 5)
                if not words[0].endswith(":"):
                    counted = len(words) == 6 and words[5].startswith(prefix)
                elif counted and words[0] == "Rss:":
                    total += int(words[1]) << 10
    except OSError:
        return 0
    return total


def _field(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
