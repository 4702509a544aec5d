"""Workers forked from a process that has their imports; a fork server that dies or hangs is
replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from penstock.errors import InternalError, PenstockError
from penstock.fork_server import Fork
from penstock.memory.readings.control_group import remove_leftovers
from penstock.server.processes.fork_server_client import ForkServerProcess
from penstock.server.processes.launcher import LauncherLost
from penstock.wire import EngineKind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.server.processes.launcher import Child
    from penstock.wire import LoadSpec

log = logging.getLogger(__name__)

_ENGINES = {
    EngineKind.GENERATE: "penstock.worker.loading",
    EngineKind.ENCODE: "penstock.worker.encoding.loading",
}


class ForkLauncher:
    """The launcher of a system that can fork."""

    def __init__(
        self,
        home: Path,
        *,
        engine_module: str | None = None,
        preload: Sequence[str] = ("penstock.worker.preload",),
    ) -> None:
        self._log_path = home / "logs" / "fork_server.log"
        self._engine_module = engine_module  # of any kind of engine; None: each has its own
        self._preload = tuple(preload)
        self._fork_server: asyncio.Task[ForkServerProcess] | None = None
        self._launched: ForkServerProcess | None = None  # the same, while it still starts too
        self._closed = False
        # Of its own: requests may take all threads of the event loop for many seconds.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="launching")

    def warm(self) -> None:
        """Start the fork server in the background."""
        self._ensure().add_done_callback(_report)

    async def launch(self, spec: LoadSpec, fds: Sequence[int]) -> Child:
        """A fork that serves `spec`."""
        module = self._engine_module or _ENGINES[spec.engine]
        return await (await self.fork_server()).fork(Fork(spec, module), fds)

    async def started(self) -> int:
        """The fork server's process id, once it has all its imports."""
        return (await self.fork_server()).pid

    async def fork_server(self) -> ForkServerProcess:
        """The running fork server; raises `InternalError` with its last output if it cannot start.
        One that hangs while it starts is replaced, once."""
        try:
            return await asyncio.shield(self._ensure())
        except LauncherLost as error:
            log.error("the fork server is replaced: %s", error.message)
            return await asyncio.shield(self._ensure())

    def process(self) -> tuple[int, bool] | None:
        """The fork server's process id, from its birth on, and whether it has all its imports."""
        launched = self._launched
        if launched is None or not launched.alive:
            return None
        return launched.pid, launched.up is not None

    async def close(self) -> None:
        """End the fork server."""
        self._closed = True
        if self._fork_server is not None:
            self._fork_server.cancel()
            with contextlib.suppress(asyncio.CancelledError, PenstockError):
                await (await self._fork_server).stop()
            self._fork_server = None

    def _ensure(self) -> asyncio.Task[ForkServerProcess]:
        if self._closed:
            raise InternalError("The server is shutting down.")
        if self._fork_server is None or _is_spent(self._fork_server):
            start = self._start(self._fork_server)
            self._fork_server = asyncio.get_running_loop().create_task(start)
        return self._fork_server

    async def _start(self, spent: asyncio.Task[ForkServerProcess] | None) -> ForkServerProcess:
        if spent is not None and not spent.cancelled() and spent.exception() is None:
            await spent.result().stop()
        await asyncio.get_running_loop().run_in_executor(self._thread, remove_leftovers)
        self._launched = ForkServerProcess.launch(self._preload, self._log_path)
        await self._launched.wait_until_up()
        return self._launched


def _is_spent(fork_server: asyncio.Task[ForkServerProcess]) -> bool:
    if not fork_server.done():
        return False
    return (
        fork_server.cancelled()
        or fork_server.exception() is not None
        or not fork_server.result().alive
    )


def _report(fork_server: asyncio.Task[ForkServerProcess]) -> None:
    if not fork_server.cancelled() and (error := fork_server.exception()) is not None:
        log.error("the fork server did not start: %s", error)
