"""What a child process prints: a log file that cannot grow without bound, and its last lines.

The child writes into a pipe, so that messages of C libraries and dying words are caught too; the
event loop copies them. A log that cannot be written is no reason to fail anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from penstock.config.private import make_folder, opener

if TYPE_CHECKING:
    from pathlib import Path

MAX_FILE_BYTES = 4 << 20  # then the file becomes NAME.log.1, and the one before that goes
TAIL_BYTES = 16 << 10
TAIL_LINES = 40


class OutputLog:
    """A pipe whose other end is a child's stdout and stderr."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with contextlib.suppress(OSError):
            make_folder(path.parent)
        self._tail = bytearray()
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_fd, self._copy)

    def handed_over(self) -> None:
        """The child has its copy of `write_fd`; ours would keep the pipe open for ever."""
        os.close(self.write_fd)
        self.write_fd = -1

    def tail(self) -> str:
        """The last lines, for an error message or a report of a death."""
        self._drain()
        lines = bytes(self._tail).decode(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def close(self) -> None:
        """Copy what is left in the pipe and let go of it."""
        self._drain()
        self._release()
        if self.write_fd != -1:
            self.handed_over()

    def _drain(self) -> None:
        while self._read_fd != -1 and self._copy():
            pass

    def _copy(self) -> bool:
        """Copy one piece; False when there was none."""
        try:
            data = os.read(self._read_fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._release()
            return False
        self._tail += data
        del self._tail[:-TAIL_BYTES]
        with contextlib.suppress(OSError):
            self._append(data)
        return True

    def _append(self, data: bytes) -> None:
        with open(self.path, "ab", opener=opener) as file:
            file.write(data)
            full = file.tell() > MAX_FILE_BYTES
        if full:
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))

    def _release(self) -> None:
        if self._read_fd != -1:
            self._loop.remove_reader(self._read_fd)
            os.close(self._read_fd)
            self._read_fd = -1
