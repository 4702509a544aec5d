"""A plan computed: batch, forward, prompt log-probabilities, tokens. Changes no sequence.

So a step that fails half-way leaves nothing to undo, and a profile can run steps that no request
asked for.
"""

from __future__ import annotations

import time
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from penstock.wire import Output
from penstock.worker.engine.batch import build_batch
from penstock.worker.engine.grammar import refuse_unconstrained
from penstock.worker.engine.sampler import logprobs_of, sample
from penstock.worker.turns import PROCESSOR

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.wire import Submit, TokenLogprobs
    from penstock.worker.engine.grammar import Grammars, Vocabulary
    from penstock.worker.engine.runner import Runner
    from penstock.worker.scheduling.plan import Plan, Slice
    from penstock.worker.scheduling.sequence import Sequence


@dataclass(slots=True)
class StepResult:
    """What a step gave, by request number."""

    outputs: dict[int, Output] = field(default_factory=dict)  # without `finish`
    tokens: dict[int, int] = field(default_factory=dict)  # of the slices that sample
    scored: dict[int, int] = field(default_factory=dict)  # prompt tokens scored once it is taken
    failed: dict[int, str] = field(default_factory=dict)  # requests whose grammar went wrong
    forward_s: float = 0.0
    waited_s: float = 0.0  # for others that compute on the same cores


class Launched(Protocol):
    """A step on its way."""

    plan: Plan
    places: dict[Sequence, int]  # of the tokens it samples, among those left on the device
    wants_host: bool  # nothing may be launched before its result is taken

    def result(self) -> StepResult:
        """What it gave; waits for it."""


@dataclass(slots=True)
class Done:
    """A step that is over when its launch returns, as on a CPU."""

    plan: Plan
    outcome: StepResult
    places: dict[Sequence, int] = field(default_factory=dict)
    wants_host: bool = True

    def result(self) -> StepResult:
        return self.outcome


class Constraints:
    """The grammars that answers are held to, if the model's vocabulary is known."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary

    @property
    def _grammars(self) -> Grammars | None:
        return None if self._vocabulary is None else self._vocabulary.known

    @property
    def constrains(self) -> bool:
        """Whether answers can be constrained at once."""
        return self._grammars is not None

    def prepare(self) -> bool:
        """Read the vocabulary for whoever may want it; whether that was still to be done.

        Waits for it: at its highest it takes what a step may, and so nothing may run beside it.
        Should it fail, the first who wants it will hear of it.
        """
        if self._vocabulary is None or self._vocabulary.tried:
            return False
        wait([self._vocabulary.read()])
        return True

    @property
    def reading_bytes(self) -> int:
        """What `prepare` may take at its highest."""
        return 0 if self._vocabulary is None else self._vocabulary.reading_bytes

    def complete(self) -> None:
        """Have everything in place that a request may ever need."""
        if self._vocabulary is not None:
            self._vocabulary.read().result()

    def admit(self, request: Submit) -> None:
        """A request will be in plans; what constrains its answer is made ready."""
        if request.grammar is None and request.thinking is None:
            return
        grammars = None if self._vocabulary is None else self._vocabulary.read().result()
        if grammars is None:
            refuse_unconstrained()
        else:
            grammars.add(request)

    def forget(self, request_id: int) -> None:
        """It will be in none any more."""
        if self._grammars is not None:
            self._grammars.remove(request_id)


class Executor(Constraints):
    """Runs plans on one model."""

    def __init__(self, runner: Runner, vocabulary: Vocabulary | None = None) -> None:
        self._runner = runner
        super().__init__(vocabulary)
        self.model = runner.model
        self.graph_bytes = 0
        self._turns = PROCESSOR if runner.arena.in_ram else None  # a GPU shares itself out
        self._block_tokens = runner.arena.layout.block_tokens

    def logits(self, plan: Plan) -> Tensor:
        """Write the KV of a plan's rows; the logits of those that need them."""
        batch = build_batch(plan, self._block_tokens, self._runner.device)
        return self._runner.forward(batch).float()

    @property
    def crowded(self) -> bool:
        """Whether others want the same cores: then a long step is in their way."""
        return self._turns is not None and self._turns.crowded

    def launch(self, plan: Plan, earlier: Launched | None = None) -> Launched:
        """Start a plan, whose newest tokens may be `earlier`'s."""
        if self._turns is None:
            return Done(plan, self.compute(plan))
        begun = time.perf_counter()
        try:
            self._turns.take()
            waited_s = time.perf_counter() - begun
            result = self.compute(plan)
        finally:
            self._turns.give()
        result.waited_s = waited_s
        return Done(plan, result)

    @torch.inference_mode()
    def compute(self, plan: Plan) -> StepResult:
        """One forward, and everything that follows from its logits."""
        result = StepResult()
        sampling = [piece.sequence for piece in plan.slices if piece.samples]
        grammars = self._grammars
        pending = None if grammars is None else grammars.begin(sampling)
        batch = build_batch(plan, self._block_tokens, self._runner.device)
        started = time.perf_counter()
        logits = self._runner.forward(batch).float()
        result.forward_s = time.perf_counter() - started
        rows, samplers = sampling_rows(plan)
        score_prompts(plan, logits, result)
        if samplers:
            among = None if len(rows) == logits.shape[0] else rows
            masks = None if pending is None else pending.result()
            result.failed = {} if masks is None else masks.failed
            sampled = sample(logits, sampling, masks, among)
            take_tokens(samplers, sampled.tokens, sampled.logprobs, result)
        return result


def sampling_rows(plan: Plan) -> tuple[list[int], list[Slice]]:
    """Rows of the logits from which a token is sampled, and whose."""
    rows, samplers, row = [], [], 0
    for piece in plan.slices:
        row += piece.logit_rows
        if piece.samples:
            rows.append(row - 1)
            samplers.append(piece)
    return rows, samplers


def take_tokens(
    samplers: list[Slice],
    tokens: list[int],
    logprobs: list[TokenLogprobs | None],
    result: StepResult,
) -> None:
    """Sampled tokens as outputs."""
    for piece, token, scores in zip(samplers, tokens, logprobs, strict=True):
        number = piece.sequence.id
        result.tokens[number] = token
        output = result.outputs.setdefault(number, Output(number))
        output.tokens = [token]
        output.logprobs = [scores] if scores else None


def score_prompts(plan: Plan, logits: Tensor, result: StepResult) -> None:
    """Log-probabilities of prompt tokens, where they are asked for."""
    row = 0
    for piece in plan.slices:
        first, row = row, row + piece.logit_rows
        if piece.sequence.wants_prompt_logits:
            _score_prompt(piece, logits[first:row], result)


def _score_prompt(piece: Slice, logits: Tensor, result: StepResult) -> None:
    """Row i predicts token i + 1; the first token has no row. None is sent twice."""
    sequence = piece.sequence
    request = sequence.request
    following = request.prompt[piece.start + 1 : piece.end + 1]
    scores: list[TokenLogprobs | None] = [None] if piece.start == 0 else []
    if following:
        scores += logprobs_of(logits[: len(following)], following, request.prompt_logprobs or 0)
    # A sequence that was preempted computes its rows again.
    fresh = scores[sequence.scored - (piece.start + 1 if piece.start else 0) :]
    result.scored[sequence.id] = sequence.scored + len(fresh)
    result.outputs[sequence.id] = Output(sequence.id, prompt_logprobs=fresh)
