"""A lower scheduling priority (nice) for a worker that loads while other models serve.

A load computes with as many threads as a model that serves, and two such on the same cores wait for
each other's threads most of the time. Knows threads, not what they do.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

LOADING_NICE = 10


@contextmanager
def behind_others() -> Iterator[None]:
    """Within it, this thread and those it starts come after others; afterwards all are as before.

    Nothing changes where a process may not raise its priority again (without CAP_SYS_NICE, or a
    limit such as systemd's `LimitNICE=0`): slow for ever would be worse than in the way for once.
    """
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    if not sys.platform.startswith("linux") or not _can_return(usual):
        yield
        return
    os.setpriority(os.PRIO_PROCESS, 0, usual + LOADING_NICE)  # of this thread alone
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, usual)
        for thread in Path("/proc/self/task").iterdir():
            try:
                if os.getpriority(os.PRIO_PROCESS, int(thread.name)) > usual:
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), usual)
            except ProcessLookupError:
                continue  # it has ended meanwhile


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
