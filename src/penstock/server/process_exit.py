"""The end of the server's process, whatever its threads do.

Python waits at its end for the threads of every pool, and a thread that is stuck in a library's
code or on a dead disk never ends. Workers have been ended by then, and nothing is left to save.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from typing import NoReturn


def leave(code: int = 0) -> NoReturn:
    """End this process now, after what was said has been written."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more
            continue
    os._exit(code)


def leave_within(seconds: float) -> None:
    """End this process after so long, even if its event loop no longer turns. Where each thread was
    is on stderr then, and workers notice that their sockets have ended."""
    faulthandler.dump_traceback_later(seconds, exit=True)
