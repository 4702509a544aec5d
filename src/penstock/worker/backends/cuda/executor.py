"""Plans on a GPU: launched without waiting, their tokens fetched when somebody asks.

What a step samples stays on the device for the rows of the next, so the host can plan and launch
that one while this one runs. The answer is the same: every number a row depends on is in the plan,
in the arena or among those tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from penstock.worker.backends.executor import (
    Executor,
    on_time,
    sampling_rows,
    take_tokens,
)
from penstock.worker.core.backend import StepResult
from penstock.worker.engine.sampler import wants_host

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.wire import TokenLogprobs
    from penstock.worker.backends.cuda.runner import CudaRunner
    from penstock.worker.core.backend import StepHandle
    from penstock.worker.core.plan import Plan, Slice
    from penstock.worker.engine.grammar import Grammars
    from penstock.worker.engine.requests import RequestState
    from penstock.worker.engine.sampler import Sampler


class CudaExecutor(Executor):
    """Runs plans on one model; the device itself shares its time out between processes."""

    def __init__(self, runner: CudaRunner, grammars: Grammars, sampler: Sampler) -> None:
        super().__init__(runner.model, grammars, sampler)
        self.graph_bytes = runner.graph_bytes
        self._runner = runner
        self._timed = runner.device.type == "cuda"

    def logits(self, plan: Plan) -> Tensor:
        return self._runner.forward(plan, {}).float()

    def compute(self, plan: Plan) -> StepResult:
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: Plan, after: StepHandle | None = None) -> LaunchedStep:
        """Start a plan, whose UNKNOWN tokens are those that `after` samples."""
        assert after is None or isinstance(after, LaunchedStep)
        step = LaunchedStep(plan, self)
        if self._timed:
            step.span = _event(), _event()
            step.span[0].record()
        states = self.observe(plan)
        rows, samplers = sampling_rows(plan)
        masked = self._grammars.begin(self.states(samplers))
        logits = self._runner.forward(plan, after.places if after is not None else {})
        step.wants_host = any(map(wants_host, states))
        if step.wants_host:
            self.score_prompts(plan, states, logits, step.outcome)
        masks = self._grammars.collect() if masked else None
        rows, step.samplers = on_time(rows, samplers, masks, step.outcome)
        if step.samplers:
            step.states = self.states(step.samplers)
            wanted = logits if len(rows) == logits.shape[0] else logits[rows]
            tokens = self.sampler.choose(wanted, step.states, masks)
            self._runner.tokens[: len(rows)] = tokens
            step.places = {piece.request_id: place for place, piece in enumerate(step.samplers)}
            step.tokens = torch.empty(len(rows), dtype=tokens.dtype, pin_memory=self._timed)
            step.tokens.copy_(tokens, non_blocking=True)
            if step.wants_host:
                step.logits = wanted
        if step.span is not None:
            step.span[1].record()
        return step


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class LaunchedStep:
    """A step on its way."""

    plan: Plan
    requests: Executor
    # By request id: where the token that it samples is left on the device.
    places: dict[int, int] = field(default_factory=dict)
    wants_host: bool = False
    samplers: list[Slice] = field(default_factory=list)
    states: list[RequestState] = field(default_factory=list)  # of those that sample
    tokens: Tensor | None = None  # pinned; there when the step has ended
    logits: Tensor | None = None  # where they are asked about
    outcome: StepResult = field(default_factory=StepResult)
    span: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # its beginning and its end

    @property
    def late(self) -> set[int]:
        return self.outcome.late

    @torch.inference_mode()
    def result(self) -> StepResult:
        """What it gave; waits for it."""
        if self.span is not None:
            began, ended = self.span
            ended.synchronize()
            self.outcome.forward_s = began.elapsed_time(ended) / 1e3
        if self.tokens is not None:
            tokens: list[int] = self.tokens.tolist()
            logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
            if self.logits is not None:
                logprobs = self.requests.sampler.chosen_logprobs(self.logits, tokens, self.states)
            take_tokens(self.samplers, tokens, logprobs, self.outcome)
        return self.requests.settled(self.outcome)
