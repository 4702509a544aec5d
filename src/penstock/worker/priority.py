"""A lower scheduling priority (nice) for a worker that loads while other models serve.

A load computes with as many threads as a model that serves, and two such on the same cores wait for
each other's threads most of the time. Knows threads, not what they do.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

LOADING_NICE = 10


@contextmanager
def behind_others(*, everyone: bool = False) -> Iterator[None]:
    """Within it, this thread and those it starts come after others, or all threads of the process
    do; afterwards all are as before.

    Nothing changes where a process may not raise its priority again (without CAP_SYS_NICE, or a
    limit such as systemd's `LimitNICE=0`): slow for ever would be worse than in the way for once.
    """
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    if not sys.platform.startswith("linux") or not _can_return(usual):
        yield
        return
    os.setpriority(os.PRIO_PROCESS, 0, usual + LOADING_NICE)  # of this thread alone
    before: dict[int, int] = {}
    try:
        if everyone:
            before = _lower_all(usual + LOADING_NICE)
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, usual)
        _raise_all(before, usual)


def _lower_all(nice: int) -> dict[int, int]:
    """What the threads had that come before that."""
    before = {}
    for thread, own in _threads():
        if own < nice:
            before[thread] = own
            os.setpriority(os.PRIO_PROCESS, thread, nice)
    return before


def _raise_all(before: dict[int, int], usual: int) -> None:
    for thread, own in _threads():
        if own > before.get(thread, usual):
            os.setpriority(os.PRIO_PROCESS, thread, before.get(thread, usual))


def _threads() -> Iterator[tuple[int, int]]:
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            yield int(task.name), os.getpriority(os.PRIO_PROCESS, int(task.name))


def _can_return(usual: int) -> bool:
    """Tried by a thread of its own, which ends in either case."""
    returned: list[bool] = []

    def attempt() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, usual + 1)
        try:
            os.setpriority(os.PRIO_PROCESS, 0, usual)
        except OSError:
            return
        returned.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(returned)
