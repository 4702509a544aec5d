"""Worker processes: their birth from a launcher, their socket, and every way they can end.

One `Supervisor` per server, one `WorkerHandle` per process. A handle says what became of its
process; whether to start another is decided in `residency`. End of file on a worker's socket is
its death; the exit code follows from the launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from penstock.errors import InternalError, WorkerLost, by_code
from penstock.memory.readings.control_group import oom_kills, remove_group
from penstock.server.processes.launcher import LauncherLost
from penstock.server.processes.output_log import OutputLog
from penstock.server.processes.worker_client import ModelClient
from penstock.wire import (
    Alive,
    FrameReader,
    Freed,
    LoadFailed,
    Loading,
    LoadSpec,
    Ready,
    Shutdown,
    Step,
    ToWorker,
    frame,
    from_worker,
)

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from pathlib import Path

    from penstock.server.processes.launcher import Child, Launcher

log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0  # to finish the step in hand
TERM_GRACE_S = 1.0  # from SIGTERM to SIGKILL
# How far apart the two signs of a death may lie: the socket's end and the parent's word.
EXIT_WAIT_S = 2.0
_LAST_LINES = 12  # of a dead worker's output, in the event


@dataclass(frozen=True, slots=True)
class Ending:
    """How a worker's process ended."""

    words: str
    code: int | None = 0  # negative: a signal; None: nobody knows
    oom_kill: bool | None = False  # None: there is no telling
    last_lines: tuple[str, ...] = ()
    lost_requests: int = 0  # that were open

    def row(self) -> dict[str, object]:
        """As figures, for an event."""
        named = None if self.code is None or self.code >= 0 else _signal_name(-self.code)
        return {
            "cause": self.words,
            "exit_code": self.code if named is None else None,
            "signal": named,
            "oom_kill": "unknown" if self.oom_kill is None else self.oom_kill,
            "lost_requests": self.lost_requests,
            "last_lines": list(self.last_lines),
        }


class Supervisor:
    """Starts workers; `close` ends all of them and the launcher."""

    def __init__(self, home: Path, launcher: Launcher) -> None:
        self.launcher = launcher
        self._logs = home / "logs"
        self._workers: set[WorkerHandle] = set()
        self._closed = False
        # Of its own: a death is not to wait for requests, which may take all threads of the event
        # loop for many seconds. It ends with this object, since the last burial may come late.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="supervision")

    async def start(self, spec: LoadSpec, grammars: socket.socket | None = None) -> WorkerHandle:
        """A new process that loads `spec`; await the handle's `ready` for the outcome. A launcher
        that is lost is asked again, once.

        `grammars` leads to the model's grammar host; the process gets a copy.
        """
        try:
            return await self._start(spec, grammars)
        except LauncherLost as error:
            log.error("a worker of %s could not be launched: %s", spec.name, error.message)
            return await self._start(spec, grammars)

    async def _start(self, spec: LoadSpec, grammars: socket.socket | None) -> WorkerHandle:
        if self._closed:
            raise InternalError("The server is shutting down.")
        await self.launcher.started()  # which may take long, so no descriptor is open meanwhile
        ours, theirs = socket.socketpair()
        output = OutputLog(self._logs / f"{_file_name(spec.name)}.log")
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            undo.callback(output.close)
            with theirs:
                fds = [theirs.fileno(), output.write_fd]
                if grammars is not None:
                    fds.append(grammars.fileno())
                child = await self.launcher.launch(spec, fds)
            output.handed_over()
            worker = WorkerHandle(spec, child, output, self._thread)
            await worker.connect(ours)
            undo.pop_all()
        self._workers.add(worker)
        worker.ended.add_done_callback(lambda _: self._workers.discard(worker))
        if self._closed:  # while this one was being born
            await worker.stop(0)
            raise InternalError("The server is shutting down.")
        return worker

    async def close(self, grace_s: float = STOP_GRACE_S) -> None:
        """End every worker, then the launcher; nothing of ours runs afterwards."""
        self._closed = True
        await asyncio.gather(*(worker.stop(grace_s) for worker in list(self._workers)))
        await self.launcher.close()


class WorkerHandle:
    """One worker process, from its birth to its burial."""

    def __init__(self, spec: LoadSpec, child: Child, output: OutputLog, thread: Executor) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.pid = child.pid
        self.client = ModelClient(spec.name, self._send)
        self.progress: Loading | None = None  # the latest of the load
        self.ready: asyncio.Future[Ready] = loop.create_future()  # or raises why there is no model
        self.ended: asyncio.Future[Ending] = loop.create_future()
        self.alive = True  # until the first sign of its death
        self._exit_code = child.exit_code
        self._exit_code.add_done_callback(self._on_exit_code)
        self._log = output
        self._thread = thread  # for what blocks
        self.end_expected = False  # we asked for it, or it has said why it cannot serve
        self.words_heard = 0
        self.hang = ""  # why we end it, if it hangs
        self._transport: asyncio.Transport | None = None
        self._exit_task: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    async def connect(self, sock: socket.socket) -> None:
        """Take over the server's end of the worker's socket."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: _Reader(self), sock=sock)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ask it to end, then make it; returns when the process is gone."""
        self.end_expected = True
        self._send(Shutdown())
        for wait_s, sign in ((grace_s, signal.SIGTERM), (TERM_GRACE_S, signal.SIGKILL)):
            await asyncio.wait([self.ended], timeout=wait_s)
            if self.ended.done():
                return
            self.kill(sign)
        await asyncio.shield(self.ended)

    def end_hung(self, why: str) -> None:
        """End it without asking: it has stopped working. To its requests that is a death."""
        if self.alive and not self.hang:
            self.hang = why
            self._ending = asyncio.get_running_loop().create_task(self._end_hung())

    async def _end_hung(self) -> None:
        self.kill(signal.SIGTERM)
        await asyncio.wait([self.ended], timeout=TERM_GRACE_S)
        self.kill(signal.SIGKILL)  # a process that is stopped hears nothing less

    def kill(self, sign: signal.Signals) -> None:
        """Send a signal, unless the process has already been reaped."""
        if self._exit_code.done() and self._exit_code.result() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, sign)

    def on_connect(self, transport: asyncio.Transport) -> None:
        """The socket is ours."""
        self._transport = transport

    def on_message(self, message: Step | Loading | Ready | LoadFailed | Alive | Freed) -> None:
        """What the worker said."""
        self.words_heard += 1
        match message:
            case Step() | Alive() | Freed():
                self.client.receive(message)
            case Loading():
                self.progress = message
            case Ready():
                self.client.receive(message)
                self.ready.set_result(message)
            case LoadFailed():
                self.end_expected = True
                failure = message.failure
                error = by_code(failure.code)(failure.message, numbers=failure.numbers)
                self.ready.set_exception(error)

    def on_end_of_file(self) -> None:
        """The worker is dead or dying."""
        self.alive = False
        self._exit_task = asyncio.get_running_loop().create_task(self._on_exit())

    def _send(self, message: ToWorker) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def _on_exit_code(self, exit_code: asyncio.Future[int | None]) -> None:
        # Its last frames may still be in the socket, so the end of file is waited for, but not
        # for ever: a process that the worker has started could hold the socket open.
        if not exit_code.cancelled() and exit_code.result() is not None and self._transport:
            self.alive = False
            asyncio.get_running_loop().call_later(EXIT_WAIT_S, self._transport.abort)

    async def _on_exit(self) -> None:
        await asyncio.wait([self._exit_code], timeout=EXIT_WAIT_S)
        if not self._exit_code.done():
            self.kill(signal.SIGKILL)
            await asyncio.wait([self._exit_code], timeout=EXIT_WAIT_S)
        code = self._exit_code.result() if self._exit_code.done() else None
        oom_kill = await asyncio.get_running_loop().run_in_executor(
            self._thread, _close_group, self.pid, code
        )
        self._log.close()
        cause = describe_exit(code, oom_kill) if not self.hang else f"{self.hang} and was ended"
        name = self.spec.name
        lines = tuple(self._log.tail().splitlines()[-_LAST_LINES:])
        ending = Ending(cause, code, oom_kill, lines, self.client.open_requests)
        if self.end_expected:
            lost = f"The model {name!r} was unloaded before this request was finished."
            log.info("worker %d of %s ended: %s", self.pid, name, cause)
        else:
            lost = f"The process of the model {name!r} ended: {cause}. Please send it again."
            log.error(
                "worker %d of %s ended: %s; its last lines, also in %s:\n%s",
                self.pid,
                name,
                cause,
                self._log.path,
                self._log.tail(),
            )
        if not self.ready.done():
            self.ready.set_exception(WorkerLost(lost))
        self.ready.exception()  # whoever wanted to know has asked by now
        self.client.lose(lost)
        self.ended.set_result(ending)


class _Reader(asyncio.Protocol):
    """Cuts what arrives from a worker into messages."""

    def __init__(self, worker: WorkerHandle) -> None:
        self._worker = worker
        self._frames = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface of asyncio's, but not the class.
        self._worker.on_connect(cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._worker.on_message(from_worker.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.on_end_of_file()


def describe_exit(code: int | None, oom_kill: bool | None = None) -> str:
    """How a process ended, in words that point to the usual cause."""
    if code is None:
        return "its exit code is unknown, because the fork server died before it"
    if code >= 0:
        return f"it exited with code {code}"
    name = _signal_name(-code)
    if oom_kill:
        return f"the kernel killed it by {name}, because it held more memory than its group may"
    if -code == signal.SIGKILL and oom_kill is None:
        return f"it was killed by {name}, which is what the kernel sends when memory runs out"
    return f"it was killed by {name}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _close_group(pid: int, code: int | None) -> bool | None:
    """The last of a dead process's control group, also of one that died while loading: whether the
    kernel killed it for want of memory; None where nothing tells."""
    oom_kill = _was_oom_kill(pid, code)
    remove_group(pid)
    return oom_kill


def _was_oom_kill(pid: int, code: int | None) -> bool | None:
    """Whether the kernel did it for want of memory; None where nothing tells."""
    if code != -signal.SIGKILL:
        return None if code is None else False
    kills = oom_kills(pid)
    return None if kills is None else kills > 0


def _file_name(model: str) -> str:
    return re.sub(r"[^\w.-]+", "_", model)
