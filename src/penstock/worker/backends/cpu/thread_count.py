"""How many threads a step uses: as many as find a core.

The threads of a step wait for each other several times a layer. Where another program has one of
the cores, each of these waits may last until that program's share of time is over, and two threads
are several times slower than one. The kernel says how long threads were ready and had no core: so
many of them are too many. Cores that stand idle say how many more there may be.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.worker.backends.executor import StepLock

# Time in steps after which the threads' waits are read.
WINDOW_S = 0.1
# Threads that waited for a core at any moment, on average, from which there is one too many.
CROWDED = 0.25
# How often idle cores are counted, where fewer threads are used than there may be.
LOOK_S = 1.0
LONGEST_LOOK_S = 16.0  # after more threads have failed again and again
# A core that is idle for this share of the time has room for a thread.
IDLE_SHARE = 0.7
# More threads that do for so long were no mistake.
PROVEN_S = 5.0


class Cores(Protocol):
    """What the kernel says of this process's threads and of its cores."""

    def waited_s(self) -> float:
        """For how long all threads of this process were ready and had no core."""

    def idle_s(self) -> float:
        """For how long the cores that this process may use were idle, together."""


class LinuxCores:
    """From /proc."""

    @staticmethod
    def readable() -> bool:
        """Whether this system says so much."""
        return Path("/proc/self/schedstat").exists() and Path("/proc/stat").exists()

    def __init__(self) -> None:
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")
        self._cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}

    def waited_s(self) -> float:
        waited_ns = 0
        for task in Path("/proc/self/task").iterdir():
            try:
                waited_ns += int((task / "schedstat").read_text().split()[1])
            except FileNotFoundError:  # it has ended
                continue
        return waited_ns / 1e9

    def idle_s(self) -> float:
        ticks = 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *times = line.split()
            if name in self._cores:
                ticks += int(times[3]) + int(times[4])  # idle, and waiting for a disk
        return ticks * self._tick_s


@dataclass(slots=True)
class _Mark:
    """A reading, and when it was made."""

    at_s: float
    value_s: float


class ThreadCount:
    """The number of threads, looked at between steps.

    `apply` puts a number in force; `most` is in force at the start.
    """

    def __init__(
        self,
        most: int,
        cores: Cores,
        apply: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now = most
        self._max_threads = most
        self._cores = cores
        self._apply = apply
        self._clock = clock
        self._stepped_s = 0.0  # in steps since the waits were read
        self._began_s = 0.0
        self._waits_s = 0.0  # as the window began
        self._idle = _Mark(0.0, 0.0)
        self._look_s = LOOK_S
        self._raised_at_s = -PROVEN_S

    def begin(self) -> None:
        """A step begins."""
        self._began_s = self._clock()
        if not self._stepped_s and self._max_threads > 1:
            self._waits_s = self._cores.waited_s()
        if self.now < self._max_threads and self._began_s - self._idle.at_s >= self._look_s:
            self._raise()

    def end(self) -> None:
        """A step has ended."""
        now_s = self._clock()
        self._stepped_s += now_s - self._began_s
        if self._max_threads == 1 or self._stepped_s < WINDOW_S:
            return
        waiting = (self._cores.waited_s() - self._waits_s) / self._stepped_s
        self._stepped_s = 0.0
        if waiting > CROWDED and self.now > 1:
            self._lower(max(1, self.now - max(1, round(waiting))), now_s)

    def _lower(self, threads: int, now_s: float) -> None:
        hasty = now_s - self._raised_at_s < PROVEN_S
        self._look_s = min(2 * self._look_s, LONGEST_LOOK_S) if hasty else LOOK_S
        self._idle = _Mark(now_s, self._cores.idle_s())
        self._set(threads)

    def _raise(self) -> None:
        idle = _Mark(self._began_s, self._cores.idle_s())
        free = (idle.value_s - self._idle.value_s) / (idle.at_s - self._idle.at_s)
        self._idle = idle
        more = int(free + 1 - IDLE_SHARE)
        if more:
            self._raised_at_s = self._began_s
            self._set(min(self._max_threads, self.now + more))

    def _set(self, threads: int) -> None:
        self.now = threads
        self._apply(threads)


class CountedSteps:
    """A step lock whose holder computes on as many threads as find a core."""

    def __init__(self, lock: StepLock, threads: ThreadCount) -> None:
        self._lock = lock
        self._threads = threads

    @property
    def crowded(self) -> bool:
        return self._lock.crowded

    def take(self) -> bool:
        taken = self._lock.take()
        self._threads.begin()
        return taken

    def give(self) -> None:
        self._threads.end()
        self._lock.give()
