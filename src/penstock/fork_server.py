"""The fork server: imports what every worker needs once, then forks a worker per order.

The server starts `python -m penstock.fork_server` and talks to it over one Unix socket. An order
carries a `Fork` and file descriptors (the worker's own socket, its log and the socket to its
grammar host). The fork server answers with the new process id and later, as the parent, with how
that process ended. It runs no tensor operation and starts no thread, so a fork of it is safe; end
of file on the socket ends it.

The stdlib's forkserver is not used: there is one per program, it hides a failed import, takes its
environment from the server's own, runs the server's main module again in every worker, and needs
a second helper process and a socket file, both left behind by a kill.

This module knows neither torch nor the worker: both arrive by name.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

import msgspec

from penstock.wire import HEADER, LoadSpec, frame

_ORDER_FDS = 3  # the worker's socket, the worker's log and, perhaps, one to its grammar host
_PR_SET_NAME = 15


class Fork(msgspec.Struct, tag=True):
    """Make a worker for `spec`; `engine` names the module whose `load_engine` builds its engine."""

    spec: LoadSpec
    engine: str


class Up(msgspec.Struct, tag=True):
    """The imports are done; orders are taken from now on."""

    pid: int
    threads: int  # 1, or forks are not safe
    import_s: float


class Forked(msgspec.Struct, tag=True):
    """The order's answer: the worker runs."""

    pid: int


class ForkFailed(msgspec.Struct, tag=True):
    """The order's answer: the system refused another process."""

    reason: str


class Exited(msgspec.Struct, tag=True):
    """A worker has ended and has been reaped; a negative code is the signal that ended it."""

    pid: int
    code: int


FromForkServer = Up | Forked | ForkFailed | Exited

from_fork_server = msgspec.msgpack.Decoder(FromForkServer)
_fork_order = msgspec.msgpack.Decoder(Fork)


def set_process_name(name: str) -> None:
    """Show `name` in `ps` and `top` (15 bytes of it), where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def thread_count() -> int:
    """Threads of this process, those of C libraries included where the system tells."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


class ForkServer:
    """Serves fork orders on `control` until its end of file."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: set[int] = set()
        # A signal handler of Python's runs between bytecodes; the wake-up descriptor makes
        # `select` return for it.
        self._wake_r, self._wake_w = os.pipe()
        for fd in (self._wake_r, self._wake_w):
            os.set_blocking(fd, False)

    def serve(self, preload: list[str]) -> None:
        """Import `preload`, then take orders. An import that fails ends the process loudly."""
        started = time.monotonic()
        gc.disable()  # no collection may write to the pages that the forks will share
        for name in preload:
            importlib.import_module(name)
        gc.freeze()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_w)
        self._say(Up(os.getpid(), thread_count(), time.monotonic() - started))
        while True:
            control_fd = self._control.fileno()
            readable, _, _ = select.select([control_fd, self._wake_r], [], [])
            if self._wake_r in readable:
                os.read(self._wake_r, 4096)
                self._reap()
            if control_fd in readable and not self._take_order():
                return

    def _say(self, message: FromForkServer) -> None:
        self._control.sendall(frame(message))

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._children.discard(pid)
            self._say(Exited(pid, os.waitstatus_to_exitcode(status)))

    def _take_order(self) -> bool:
        """Read one order and fork for it; False at end of file."""
        order = self._receive_order()
        if order is None:
            return False
        fork, fds = order
        try:
            pid = os.fork()
        except OSError as error:
            self._say(ForkFailed(str(error)))
        else:
            if pid == 0:
                self._become_worker(fork, *fds)
            self._children.add(pid)
            self._say(Forked(pid))
        for fd in fds:
            os.close(fd)
        return True

    def _receive_order(self) -> tuple[Fork, list[int]] | None:
        """One order whole; the server sends the next only after this one's answer."""
        data, fds, _, _ = socket.recv_fds(self._control, 1 << 16, _ORDER_FDS)
        while data and len(data) < HEADER.size + HEADER.unpack_from(data)[0]:
            more = self._control.recv(1 << 16)
            if not more:
                return None
            data += more
        if not data:
            return None
        return _fork_order.decode(data[HEADER.size :]), fds

    def _become_worker(
        self, fork: Fork, sock_fd: int, log_fd: int, grammar_fd: int | None = None
    ) -> None:
        """The rest of the life of the new process; never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._control.close()
            os.close(self._wake_r)
            os.close(self._wake_w)
            os.dup2(log_fd, 1)
            os.dup2(log_fd, 2)
            os.close(log_fd)
            gc.enable()
            faulthandler.enable()  # a crash in C leaves its Python stack in the log
            set_process_name(f"penstock: {fork.spec.name}")
            loop = importlib.import_module("penstock.worker.loop")
            spec = msgspec.structs.replace(fork.spec, grammar_fd=grammar_fd)
            code = loop.run(socket.socket(fileno=sock_fd), spec, fork.engine)
        except BaseException:  # noqa: BLE001 - the edge of the process: log it, then die of it
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # No interpreter shutdown: it would wait for threads that block on sockets and files.
            os._exit(code)


def main(arguments: list[str]) -> None:
    """`python -m penstock.fork_server CONTROL_FD MODULE...`, started by the server."""
    # The server alone decides when to stop: a terminal's ^C and a service manager's SIGTERM go
    # to every process of a group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    set_process_name("penstock: fork")
    control = socket.socket(fileno=int(arguments[0]))
    control.set_inheritable(False)
    try:
        ForkServer(control).serve(arguments[1:])
    except (BrokenPipeError, ConnectionResetError):
        return  # the server is gone; so are, by their own end of file, the workers


if __name__ == "__main__":
    main(sys.argv[1:])
