"""A penstock module run as a child process: its start, its socket, its output, its end.

What is said over the socket is the business of those who start it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from penstock.config.private import UMASK
from penstock.server.processes.output_log import OutputLog
from penstock.wire import FrameReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

_KILLED_S = 5.0  # a process that is killed is gone by then, or never
_POLL_S = 0.005


def launch_module(
    module: str,
    fds: Sequence[int],
    arguments: Sequence[str],
    output_fd: int,
    environment: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """`python -m module FD... ARGUMENT...`, which inherits these descriptors."""
    # The same code from the same places, in the same order, as the server's.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, fds), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output_fd,
        stderr=output_fd,
        pass_fds=fds,
        env={**os.environ, **environment, "PYTHONPATH": path},
        # A terminal's ^C is for the server to decide on. Not a session of its own: the kernel
        # shares cores between sessions first, and a thread of the server that has made itself nice
        # would count for as much as a whole model.
        process_group=0,
        umask=UMASK,  # of all that it starts too
    )


class ChildProcess:
    """One process, a socket to it and the log of its output."""

    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, output: OutputLog
    ) -> None:
        self.pid = process.pid
        self.control = control
        self._process = process
        self._output = output

    @classmethod
    def start(
        cls,
        module: str,
        log_path: Path,
        *,
        fds: Sequence[int] = (),
        arguments: Sequence[str] = (),
        environment: Mapping[str, str],
    ) -> ChildProcess:
        """Start it; its first descriptor is its end of `control`."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        output = OutputLog(log_path)
        with theirs:
            inherited = [theirs.fileno(), *fds]
            process = launch_module(module, inherited, arguments, output.write_fd, environment)
        output.handed_over()
        return cls(process, ours, output)

    async def frames(self) -> AsyncIterator[bytes]:
        """The bodies of what it says, until its end of file."""
        loop, reader = asyncio.get_running_loop(), FrameReader()
        while True:
            try:
                data = await loop.sock_recv(self.control, 1 << 16)
            except OSError:
                return
            if not data:
                return
            for body in reader.feed(data):
                yield body

    def last_words(self) -> str:
        """For the end of a sentence about its end."""
        return f"its last words, also in {self._output.path}:\n{self._output.tail()}"

    def kill(self) -> None:
        """End it; a process that is stopped hears nothing less."""
        self._process.kill()

    async def gone(self, patience_s: float = 0.0) -> None:
        """Wait for its end, and kill it after so long."""
        # Not in a thread: requests may have taken all of them, and for ever.
        loop = asyncio.get_running_loop()
        kill_at = loop.time() + patience_s
        while self._process.poll() is None and loop.time() < kill_at + _KILLED_S:
            if loop.time() >= kill_at:
                self._process.kill()
            await asyncio.sleep(_POLL_S)

    def close(self) -> None:
        """Let go of its socket and its log."""
        self.control.close()
        self._output.close()
