"""What a worker drives: the protocol of engines of every kind, with KV or without. No torch.

An engine's module has a `load_engine` (`EngineModule`); `penstock.worker.loop` knows nothing else
of it. What a grant is for is the engine's own affair: one without KV has nothing to shed, and says
so by the defaults of `Ready`, `Status` and `Freed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.wire import Freed, Grant, LoadSpec, Output, Ready, Status, Submit

    Progress = Callable[[str, int, int], None]  # a phase, what is done of it, and of how much


class Engine(Protocol):
    """A loaded model. Everything is called on the device thread."""

    @property
    def wants_reload(self) -> bool:
        """Whether a better profile is stored than the one in force."""

    def ready(self) -> Ready:
        """What was loaded; `pid` and `load_s` are filled in by the loop."""

    def submit(self, request: Submit) -> None:
        """Take a request; raises `PenstockError` to refuse it."""

    def cancel(self, request_id: int) -> None:
        """Forget a request; an unknown id is one that has just finished."""

    def has_work(self) -> bool:
        """Whether `step` would compute anything."""

    def step(self) -> list[Output]:
        """One forward for everything planned."""

    def grant(self, grant: Grant) -> Freed:
        """Hold no more than this from now on."""

    def shed(self, size: int) -> Freed:
        """Hold `size` bytes less from now on, of what is not in use."""

    def status(self) -> Status:
        """The figures after the latest step."""

    def notices(self) -> list[str]:
        """What people should know that has not been told yet."""

    def probe(self) -> None:
        """One real step, as small as there is; raises when it fails."""

    def tidy(self, called: Callable[[], bool]) -> float | None:
        """Some of what is left to do while there is no work and nobody has `called`; seconds until
        it should be asked again."""

    def close(self) -> None:
        """The process is about to end."""


class EngineModule(Protocol):
    """A module that is named in the order for a worker."""

    def load_engine(self, spec: LoadSpec, progress: Progress) -> Engine:
        """The engine of `spec`; raises a `PenstockError` that says why there is none."""
