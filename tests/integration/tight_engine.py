"""The real engine in a process whose memory runs out on cue: RLIMIT_DATA falls just before a step.

A layer in the middle of the forward, when KV of the ones before it is already written, then wants
more than is left: what heaps keep from earlier steps cannot save it.
`PENSTOCK_TIGHT` says when: `never`, `once` (the first step of many rows, one attempt) or the number
of a request (every step that it is in, however small).
"""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING, Any

import torch

from penstock.worker import loading
from penstock.worker.process_memory import kib_field

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.wire import LoadSpec
    from penstock.worker.core.backend import StepResult
    from penstock.worker.core.engine import GenerateEngine
    from penstock.worker.core.plan import Plan

MANY_ROWS = 200
MORE_BYTES = 32 << 20


def load_engine(spec: LoadSpec, progress: Callable[[str, int, int], None]) -> GenerateEngine:
    engine = loading.load_engine(spec, progress)
    executor: Any = engine.executor
    compute: Callable[[Plan], StepResult] = executor.compute
    cue = os.environ["PENSTOCK_TIGHT"]
    done = armed = False

    def want_more(*_: object) -> None:
        if armed:
            torch.empty(MORE_BYTES, dtype=torch.uint8)

    executor.model.model.layers[-1].register_forward_pre_hook(want_more)

    def is_cue(plan: Plan) -> bool:
        if cue == "once":
            return not done and plan.tokens >= MANY_ROWS
        return cue in {str(piece.request_id) for piece in plan.slices}

    def tight(plan: Plan) -> StepResult:
        nonlocal done, armed
        if not is_cue(plan):
            return compute(plan)
        done = armed = True
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (kib_field("VmData") + (1 << 20), hard))
        try:
            return compute(plan)
        finally:
            armed = False
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    executor.compute = tight
    return engine
