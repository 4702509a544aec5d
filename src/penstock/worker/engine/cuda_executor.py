"""Plans on a GPU: launched without waiting, their tokens fetched when somebody asks.

What a step samples stays on the device for the rows of the next, so the host can plan and launch
that one while this one runs. The answer is the same: every number a row depends on is in the plan,
in the arena or among those tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from penstock.worker.engine.executor import (
    Constraints,
    StepResult,
    sampling_rows,
    score_prompts,
    take_tokens,
)
from penstock.worker.engine.sampler import choose, chosen_logprobs, wants_host

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.wire import TokenLogprobs
    from penstock.worker.engine.cuda_runner import CudaRunner
    from penstock.worker.engine.executor import Launched
    from penstock.worker.engine.grammar import Vocabulary
    from penstock.worker.scheduling.plan import Plan, Slice
    from penstock.worker.scheduling.sequence import Sequence


class CudaExecutor(Constraints):
    """Runs plans on one model."""

    crowded = False  # the device itself shares its time out

    def __init__(self, runner: CudaRunner, vocabulary: Vocabulary | None = None) -> None:
        super().__init__(vocabulary)
        self.model = runner.model
        self.graph_bytes = runner.graph_bytes
        self._runner = runner
        self._timed = runner.device.type == "cuda"

    def logits(self, plan: Plan) -> Tensor:
        """Write the KV of a plan's rows; the logits of those that need them."""
        return self._runner.forward(plan, {}).float()

    def compute(self, plan: Plan) -> StepResult:
        """One step from beginning to end."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: Plan, earlier: Launched | None = None) -> LaunchedStep:
        """Start a plan, whose newest tokens may be `earlier`'s."""
        step = LaunchedStep(plan)
        if self._timed:
            step.span = _event(), _event()
            step.span[0].record()
        rows, step.samplers = sampling_rows(plan)
        sampling = [piece.sequence for piece in step.samplers]
        grammars = self._grammars
        pending = None if grammars is None else grammars.begin(sampling)
        logits = self._runner.forward(plan, earlier.places if earlier is not None else {})
        step.wants_host = any(wants_host(piece.sequence) for piece in plan.slices)
        if step.wants_host:
            score_prompts(plan, logits, step.outcome)
        if step.samplers:
            wanted = logits if len(rows) == logits.shape[0] else logits[rows]
            masks = None if pending is None else pending.result()
            step.outcome.failed = {} if masks is None else masks.failed
            tokens = choose(wanted, sampling, masks)
            self._runner.tokens[: len(rows)] = tokens
            step.places = {piece.sequence: place for place, piece in enumerate(step.samplers)}
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
    places: dict[Sequence, int] = field(default_factory=dict)
    wants_host: bool = False
    samplers: list[Slice] = field(default_factory=list)
    tokens: Tensor | None = None  # pinned; there when the step has ended
    logits: Tensor | None = None  # where they are asked about
    outcome: StepResult = field(default_factory=StepResult)
    span: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # its beginning and its end

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
                sequences = [piece.sequence for piece in self.samplers]
                logprobs = chosen_logprobs(self.logits, tokens, sequences)
            take_tokens(self.samplers, tokens, logprobs, self.outcome)
        return self.outcome
