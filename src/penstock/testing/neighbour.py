"""Another program on the same machine: takes memory in steps when told, and lets go of it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.testing.cage import Cage

# Written to, so that every page is there; the answer says that it is.
_PROGRAM = """
import sys
held = []
for line in sys.stdin:
    size = int(line)
    held = [*held, bytearray(b"x") * size] if size else []
    print(sum(map(len, held)), flush=True)
"""


class Neighbour:
    """A process that holds what it was told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.held_bytes = 0

    def take(self, size: int) -> None:
        """Hold so much more; returns when it is there."""
        self._tell(size)

    def let_go(self) -> None:
        """Hold nothing."""
        self._tell(0)

    def _tell(self, size: int) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{size}\n")
        self._process.stdin.flush()
        self.held_bytes = int(self._process.stdout.readline())


@contextmanager
def neighbour(cage: Cage) -> Iterator[Neighbour]:
    """One in the same cage."""
    command = cage.command([sys.executable, "-c", _PROGRAM])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Neighbour(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(10)
