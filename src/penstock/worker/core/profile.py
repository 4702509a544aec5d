"""The measured profile of a model as an engine uses it: limits, cost model, KV bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from penstock.memory.cost import CostModel
    from penstock.memory.domains import Domain
    from penstock.worker.core.drafts.drafting import Drafting
    from penstock.worker.core.plan import StepLimits

    class IdleWork(Protocol):
        """Something to do while there is no request."""

        stored: bool  # it is done, and holds when the model is loaded again

        def run(
            self, steps: int, granted: tuple[int, int], called: Callable[[], bool]
        ) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured and what follows from it."""

    cost: CostModel
    limits: StepLimits
    step_bytes: int  # the envelope of the largest step, and what requests take on the host
    host_bytes: int  # the latter
    kv_bytes: int  # what is committed for KV at most
    held_bytes: int  # on the meter, with everything in place but KV and steps
    host_tokens: int = 0  # that `host_bytes` are for
    times: tuple[tuple[int, float], ...] = ()  # rows and seconds of steps of one sequence
    kept_bytes: int = 0  # what libraries take for themselves at their first largest step
    shrunk: bool = False  # the KV, because it did not stand the test
    proven: bool = False  # by an earlier load
    provisional: bool = False  # of smaller steps than there may be: the rest is to be measured


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the engine knows of its model."""

    window: int
    vocabulary: int
    domain: Domain  # where it computes
    step_target_s: float | None = None
    drafting: Drafting | None = None  # who guesses at its next tokens; None: nobody
    calibrates: bool = False  # measure how fast prompts are computed, before the first one
    idle_work: IdleWork | None = None
