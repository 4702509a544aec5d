"""Models that compute on the same cores take turns, a step each.

A step uses all cores, and its threads wait for each other many times a millisecond. Two at once
are then far slower than one after the other: each keeps waiting for a thread that the other's have
put aside. So a step waits for its turn, which comes after one step of each other model that wants
one.

Nobody depends on it. Whoever has waited for `PATIENCE_S` computes beside the other, as all would
without turns, and does not wait again for a while, longer each time: the other may be a model of
long steps, or stopped. The turn of a process that died is taken over.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import time

PATIENCE_S = 1.0
# For so long after a turn of theirs others count as busy: they may just be between two steps.
_BUSY_S = 1.0
_LONGEST_PAUSE_S = 16.0  # in which no turn is waited for

_PROCESS_SHARED = _ROBUST = 1
_CHECKED = 2  # who has a lock is told so when it wants it again
_MUTEX_BYTES = 128  # a lock has 40 to 48; each in cache lines of its own
_LATEST = struct.Struct("qd")  # who had the latest turn, and when it was last seen with it
_LATEST_AT = 2 * _MUTEX_BYTES


class _Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class CpuStepLock:
    """Who computes now, among this process and those that were forked from it.

    Two locks: who waits for the turn holds the place in front of it, so that whoever has just had
    the turn comes behind. They are in shared memory, and the system knows whose they are.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._works = all(
            hasattr(self._libc, f"pthread_{name}")
            for name in ("mutex_clocklock", "mutex_consistent", "mutexattr_setrobust")
        )
        self._met_at = -_BUSY_S  # when another had a turn
        self._mine = False
        self._pause_s = self._again_at = 0.0
        if not self._works:  # macOS, or an old C library
            return
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._turn, self._place = (ctypes.c_void_p(start + n * _MUTEX_BYTES) for n in (0, 1))
        kind = ctypes.create_string_buffer(_MUTEX_BYTES)
        self._libc.pthread_mutexattr_init(kind)
        self._libc.pthread_mutexattr_setpshared(kind, _PROCESS_SHARED)
        self._libc.pthread_mutexattr_setrobust(kind, _ROBUST)
        self._libc.pthread_mutexattr_settype(kind, _CHECKED)
        for lock in (self._turn, self._place):
            self._libc.pthread_mutex_init(lock, kind)

    @property
    def crowded(self) -> bool:
        """Whether others have computed of late."""
        if self._works:
            self._look()
        return time.monotonic() - self._met_at < _BUSY_S

    def take(self) -> bool:
        """Wait for the turn; False where it did not come, and one computes all the same."""
        begun = time.monotonic()
        if not self._works or begun < self._again_at:
            return False
        self._mine = self._wait(begun + PATIENCE_S)
        self._look()
        if self._mine:
            self._pause_s = 0.0
            self._sign()
        else:
            self._pause_s = min(max(PATIENCE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
            self._again_at = time.monotonic() + self._pause_s
        return self._mine

    def give(self) -> None:
        """Let the next have it, if it was had."""
        if self._mine:
            self._sign()
            self._mine = False
            self._libc.pthread_mutex_unlock(self._turn)

    def _sign(self) -> None:
        _LATEST.pack_into(self._memory, _LATEST_AT, os.getpid(), time.monotonic())

    def _look(self) -> None:
        process, seen_at = _LATEST.unpack_from(self._memory, _LATEST_AT)
        if process != os.getpid():
            self._met_at = max(self._met_at, seen_at)

    def _wait(self, until_s: float) -> bool:
        second, part = divmod(until_s, 1.0)
        until = _Timespec(int(second), int(part * 1e9))
        if not self._lock(self._place, until):
            return False
        try:
            return self._lock(self._turn, until)
        finally:
            self._libc.pthread_mutex_unlock(self._place)

    def _lock(self, lock: ctypes.c_void_p, until: _Timespec) -> bool:
        result = self._libc.pthread_mutex_clocklock(
            lock, ctypes.c_int(time.CLOCK_MONOTONIC), ctypes.byref(until)
        )
        if result == errno.EOWNERDEAD:
            self._libc.pthread_mutex_consistent(lock)
        return result in (0, errno.EOWNERDEAD, errno.EDEADLK)


# Made before any worker is forked, and so the same for all of them.
STEP_LOCK = CpuStepLock()
