"""A plan computed: batch, forward, prompt log-probabilities, tokens. Changes no sequence.

So a step that fails half-way leaves nothing to undo, and a profile can run steps that no request
asked for.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from penstock.errors import PenstockError
from penstock.wire import Output
from penstock.worker.backends.caps import is_out_of_memory
from penstock.worker.backends.verifying import ahead_of, take_verified, verified_rows
from penstock.worker.core.backend import StepResult
from penstock.worker.core.failures import unfollowed
from penstock.worker.engine.grammar import MASK_WAIT_S
from penstock.worker.engine.history import PromptHistories
from penstock.worker.engine.requests import RequestState
from penstock.worker.models.batch import build_batch
from penstock.worker.vision.none import NoImages

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor
    from transformers import PreTrainedModel

    from penstock.wire import Failure, Submit, TokenIds, TokenLogprobs
    from penstock.worker.backends.runner import Runner
    from penstock.worker.core.backend import StepHandle
    from penstock.worker.core.plan import Plan, Slice
    from penstock.worker.engine.grammar import Grammars, Masks
    from penstock.worker.engine.sampler import Sampler
    from penstock.worker.vision.none import Images


STATE_MASK_WAIT_S = 0.25


class StepLock(Protocol):
    """Whose turn it is to compute, where a step uses the whole processor."""

    @property
    def crowded(self) -> bool:
        """Whether others have computed of late."""

    def take(self) -> bool:
        """Wait for the turn, but not for ever; whether it came."""

    def give(self) -> None:
        """Let the next have it."""


@dataclass(slots=True)
class FinishedStep:
    """A step that is over when its launch returns, as on a CPU."""

    plan: Plan
    outcome: StepResult
    wants_host: bool = True

    @property
    def late(self) -> set[int]:
        return self.outcome.late

    def result(self) -> StepResult:
        return self.outcome


class Executor(ABC):
    """Runs plans on one model, and has by request id what steps need beside them."""

    graph_bytes = 0  # kept on the device by steps that were captured

    def __init__(self, model: PreTrainedModel, grammars: Grammars, sampler: Sampler) -> None:
        self.model = model
        self.sampler = sampler
        self.images: Images = NoImages()
        self._grammars = grammars
        self._states: dict[int, RequestState] = {}
        self._histories = PromptHistories()

    @property
    def crowded(self) -> bool:
        """Whether others want the same processor: then a long step is in their way."""
        return False

    @abstractmethod
    def logits(self, plan: Plan) -> Tensor:
        """Write the KV of a plan's rows; the logits of those that need them."""

    @abstractmethod
    def launch(self, plan: Plan, after: StepHandle | None = None) -> StepHandle:
        """Start a plan, whose UNKNOWN tokens are those that `after` samples."""

    @abstractmethod
    def compute(self, plan: Plan) -> StepResult:
        """One step from beginning to end."""

    def admit(self, request: Submit, answered: TokenIds = (), scored: int = 0) -> None:
        """A request will be in plans, once it is `ready`; what constrains its answer is begun.
        It may have some of its answer already, and some of its prompt scored."""
        self._grammars.add(request)
        try:
            self.images.add(request)
        except PenstockError:
            self._grammars.remove(request.id)
            raise
        state = self._states[request.id] = RequestState(request, self._histories, scored=scored)
        state.extend(answered)

    def ready(self, request_id: int) -> bool:
        """Whether it may be in plans."""
        return self._grammars.ready(request_id) and self.images.ready(request_id)

    def failure(self, request_id: int) -> Failure | None:
        """Why it cannot be answered, or not in its form."""
        why = self._grammars.failure(request_id)
        return unfollowed(why) if why else self.images.failure(request_id)

    def poll(self, wait_s: float = 0.0) -> None:
        """Encode the next image; take in what grammars have to say, or what comes first within so
        long."""
        if self.images.waits:
            self.encode_next()
            wait_s = 0.0
        self._grammars.poll(wait_s)

    def encode_next(self) -> None:
        """On the device, where steps are computed."""
        self.images.work()

    @property
    def waits(self) -> bool:
        """Somebody waits for a grammar or an image."""
        return self._grammars.waits or self.images.waits

    @property
    def held(self) -> Collection[int]:
        """Requests that can take part in no step: what their next token depends on is not here."""
        return self._grammars.held

    def forget(self, request_id: int) -> None:
        """It will be in no plan any more."""
        self._grammars.remove(request_id)
        self.images.remove(request_id)
        self._states.pop(request_id, None)

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether this is what running out of memory looks like."""
        return is_out_of_memory(error)

    def observe(self, plan: Plan) -> list[RequestState]:
        """The states of a plan's slices, which know all tokens that the plan has."""
        states = self.states(plan.slices)
        for state, piece in zip(states, plan.slices, strict=True):
            state.observe(piece)
        return states

    def states(self, slices: list[Slice]) -> list[RequestState]:
        """Those of some slices."""
        return [self._states[piece.request_id] for piece in slices]

    def settled(self, result: StepResult) -> StepResult:
        """A step has ended: what it scored is not scored again, and drafts that were right are
        known; the newest token comes with the next slice."""
        for number, tokens in result.tokens.items():
            if len(tokens) > 1 and number in self._states:
                self._states[number].extend(tokens[:-1])
        for number, scored in result.scored.items():
            if number in self._states:
                self._states[number].scored = scored
        return result

    def score_prompts(
        self, plan: Plan, states: list[RequestState], logits: Tensor, result: StepResult
    ) -> None:
        """Log-probabilities of prompt tokens, where they are asked for."""
        row = 0
        for piece, state in zip(plan.slices, states, strict=True):
            first, row = row, row + piece.logit_rows
            if state.wants_prompt_logits:
                self._score_prompt(piece, state, logits[first:row], result)

    def _score_prompt(
        self, piece: Slice, state: RequestState, logits: Tensor, result: StepResult
    ) -> None:
        """Row i predicts token i + 1; the first token has no row. None is sent twice."""
        request = state.request
        following = list(request.prompt[piece.start + 1 : piece.end + 1])
        scores: list[TokenLogprobs | None] = [None] if piece.start == 0 else []
        if following:
            scores += self.sampler.logprobs_of(
                logits[: len(following)], following, request.prompt_logprobs or 0
            )
        # A sequence that was preempted computes its rows again.
        fresh = scores[state.scored - (piece.start + 1 if piece.start else 0) :]
        result.scored[state.id] = state.scored + len(fresh)
        result.outputs[state.id] = Output(state.id, prompt_logprobs=fresh)


class BlockingExecutor(Executor):
    """Steps are over when their launch returns; one process at a time computes under a `lock`."""

    def __init__(
        self, runner: Runner, grammars: Grammars, sampler: Sampler, lock: StepLock | None = None
    ) -> None:
        super().__init__(runner.model, grammars, sampler)
        self._runner = runner
        self._lock = lock
        self._block_tokens = runner.block_tokens
        # Whose mask is late computes a row again, and with a state more than that.
        recurs = runner.memory.states is not None
        self._mask_wait_s = STATE_MASK_WAIT_S if recurs else MASK_WAIT_S

    def logits(self, plan: Plan) -> Tensor:
        batch = self.images.laid(build_batch(plan, self._block_tokens, self._runner.device), plan)
        return self._runner.forward(batch).float()

    @property
    def crowded(self) -> bool:
        return self._lock is not None and self._lock.crowded

    def encode_next(self) -> None:
        if self._lock is None:
            self.images.work()
            return
        try:
            self._lock.take()
            self.images.work()
        finally:
            self._lock.give()

    def launch(self, plan: Plan, after: StepHandle | None = None) -> StepHandle:
        if self._lock is None:
            return FinishedStep(plan, self.compute(plan))
        begun = time.perf_counter()
        try:
            self._lock.take()
            waited_s = time.perf_counter() - begun
            result = self.compute(plan)
        finally:
            self._lock.give()
        result.waited_s = waited_s
        return FinishedStep(plan, result)

    @torch.inference_mode()
    def compute(self, plan: Plan) -> StepResult:
        """One forward, and everything that follows from its logits."""
        result = StepResult()
        states = self.observe(plan)
        rows, samplers = verified_rows(plan)
        masked = self._grammars.begin(self._branches(samplers))
        batch = self.images.laid(build_batch(plan, self._block_tokens, self._runner.device), plan)
        started = time.perf_counter()
        logits = self._runner.forward(batch).float()
        result.forward_s = time.perf_counter() - started
        self.score_prompts(plan, states, logits, result)
        masks = self._grammars.collect(self._mask_wait_s) if masked else None
        rows, samplers = on_time(rows, samplers, masks, result)
        if samplers:
            among = None if len(rows) == logits.shape[0] else rows
            sampled = self.sampler.sample(logits, self._branches(samplers), masks, among)
            take_verified(samplers, sampled.tokens, sampled.logprobs, result)
        return self.settled(result)

    def _branches(self, samplers: list[Slice]) -> list[RequestState]:
        """The state in which each row samples: that of its request, with the drafts before it."""
        return [
            state if not ahead else state.branch(piece.drafts[:ahead])
            for state, (piece, ahead) in zip(self.states(samplers), ahead_of(samplers), strict=True)
        ]


def on_time(
    rows: list[int], samplers: list[Slice], masks: Masks | None, result: StepResult
) -> tuple[list[int], list[Slice]]:
    """Those that sample in this step, which is all whose masks are there; `masks` counts rows
    among these afterwards."""
    if masks is None:
        return rows, samplers
    result.failed = masks.failed
    if not masks.late:
        return rows, samplers
    result.late = {samplers[place].request_id for place in masks.late}
    kept = [place for place in range(len(samplers)) if place not in masks.late]
    masks.rows = [kept.index(place) for place in masks.rows]
    return [rows[place] for place in kept], [samplers[place] for place in kept]


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
        number = piece.request_id
        output = result.outputs.setdefault(number, Output(number))
        output.tokens = [token]
        output.logprobs = [scores] if scores else None
