"""An engine without KV: it answers every prompt, all in one step, with the number of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.errors import BadRequest
from penstock.memory.cost import KvCost, Measured, fit
from penstock.wire import Finish, Freed, Grant, LoadSpec, Output, Ready, Status, Submit

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.worker.core.engine_contract import Engine, Progress

STEP_BYTES = 1 << 20


def load_engine(spec: LoadSpec, progress: Progress) -> Engine:
    progress("weights", 1, 1)
    return CountingEngine(spec)


@dataclass(slots=True)
class CountingEngine:
    spec: LoadSpec
    waiting: dict[int, Submit] = field(default_factory=dict)
    steps: int = 0
    step_bytes: int = STEP_BYTES
    wants_reload: bool = False

    def ready(self) -> Ready:
        return Ready(
            pid=0,
            device=self.spec.device,
            dtype="float32",
            weight_bytes=0,
            context=512,
            load_s=0.0,
            cost=fit([Measured(512, 8, 512, 0, STEP_BYTES)], KvCost((), 1)),
            process_bytes=0,
            step_bytes=STEP_BYTES,
            step_tokens=512,
        )

    def submit(self, request: Submit) -> None:
        if not request.prompt:
            raise BadRequest("There is nothing to count.")
        self.waiting[request.id] = request

    def cancel(self, request_id: int) -> None:
        self.waiting.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Output]:
        self.steps += 1
        taken, self.waiting = self.waiting, {}
        return [
            Output(number, [len(request.prompt)], finish=Finish.STOP)
            for number, request in taken.items()
        ]

    def grant(self, grant: Grant) -> Freed:
        before, self.step_bytes = self.step_bytes, grant.step_bytes
        return Freed(max(0, before - self.step_bytes))

    def shed(self, size: int) -> Freed:
        return Freed(0)

    def status(self) -> Status:
        return Status(0, len(self.waiting), 0, 0.0, 0.0, 0, self.steps)

    def notices(self) -> list[str]:
        return []

    def probe(self) -> None:
        self.steps += 1

    def tidy(self, called: Callable[[], bool]) -> float | None:
        return None

    def close(self) -> None:
        pass
