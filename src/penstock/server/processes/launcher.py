"""The launcher's protocol: how the supervisor gets worker processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.errors import InternalError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from penstock.wire import LoadSpec


@dataclass(frozen=True, slots=True)
class Child:
    """A worker's process."""

    pid: int
    exit_code: asyncio.Future[int | None]  # negative: a signal; None: its parent died before it


class LauncherLost(InternalError):  # noqa: N818 - as WorkerLost
    """What launches has died, or was ended because it gave no answer; asked again, there is another
    in its place."""


class Launcher(Protocol):
    """Makes worker processes."""

    def warm(self) -> None:
        """Prepare in the background, so that the first load need not wait for it."""

    async def launch(self, spec: LoadSpec, fds: Sequence[int]) -> Child:
        """A process that serves `spec`, with its own copies of `fds`: its socket, its log and,
        perhaps, the socket to its grammar host. Raises `LauncherLost` if it is worth a retry."""

    async def started(self) -> int | None:
        """The id of the process that workers come from, once it is up; None: there is none."""

    def process(self) -> tuple[int, bool] | None:
        """The same from its birth on, and whether it is up."""

    async def close(self) -> None:
        """End what was started to launch workers; they have been stopped before."""
