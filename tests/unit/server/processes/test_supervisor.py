"""The supervisor over a launcher that starts no process."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from penstock.errors import InternalError
from penstock.server.processes.launcher import Child, LauncherLost
from penstock.server.processes.supervisor import Supervisor
from penstock.wire import Failure, LoadFailed, LoadSpec, frame

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SPEC = LoadSpec("m", "/models/m", "cpu", "float32", memory_bytes=1 << 20)
NO_PID = (1 << 22) + 1  # larger than any


class PlayedLauncher:
    """Is lost `losses` times; then a worker says that it cannot load, and exits."""

    def __init__(self, losses: int) -> None:
        self.losses = losses
        self.sockets: list[int] = []
        self.closed = False

    def warm(self) -> None:
        pass

    async def started(self) -> None:
        return None

    def process(self) -> None:
        return None

    async def launch(self, spec: LoadSpec, fds: Sequence[int]) -> Child:
        self.sockets.append(os.fstat(fds[0]).st_ino)
        if len(self.sockets) <= self.losses:
            raise LauncherLost("It was played so.")
        os.write(fds[0], frame(LoadFailed(Failure("internal_error", "There is no model."))))
        exit_code: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        exit_code.set_result(3)
        return Child(NO_PID, exit_code)

    async def close(self) -> None:
        self.closed = True


def test_a_launcher_that_is_lost_is_asked_again_with_other_sockets(tmp_path: Path) -> None:
    async def scenario() -> None:
        launcher = PlayedLauncher(losses=1)
        supervisor = Supervisor(tmp_path, launcher)
        worker = await supervisor.start(SPEC)
        with pytest.raises(InternalError, match="There is no model"):
            await worker.ready
        assert (await worker.ended).words == "it exited with code 3"
        assert len(set(launcher.sockets)) == 2
        await supervisor.close()
        assert launcher.closed

    asyncio.run(scenario())


def test_a_launcher_that_is_lost_twice_is_told_to_whoever_wants_the_model(tmp_path: Path) -> None:
    async def scenario() -> None:
        supervisor = Supervisor(tmp_path, PlayedLauncher(losses=2))
        with pytest.raises(LauncherLost, match="played"):
            await supervisor.start(SPEC)
        await supervisor.close()
        with pytest.raises(InternalError, match="shutting down"):
            await supervisor.start(SPEC)

    asyncio.run(scenario())
