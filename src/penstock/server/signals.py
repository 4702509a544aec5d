"""What the signals of a terminal and of a service manager mean to the server."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def take_signals(stop: Callable[[], None], reread: Callable[[], None]) -> None:
    """SIGINT and SIGTERM stop; SIGHUP has the settings read again. It also comes when the terminal
    is closed in which the server was started: then, as ever, it ends, unless `nohup` was used."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    lasting = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN or not _has_terminal()

    def hang_up() -> None:
        if lasting or _has_terminal():
            reread()
        else:
            stop()

    loop.add_signal_handler(signal.SIGHUP, hang_up)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
