"""Steps that no request asked for, run through the real executor to see what they cost.

Their sequences share a few blocks: what a step takes beyond KV depends on how much it sees, not on
what stands there. So the longest context can be tried before there is memory for it.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.memory.cost import Measured
from penstock.sampling import demanding
from penstock.wire import Sampling, Submit, Thinking
from penstock.worker.core.plan import Plan, Slice
from penstock.worker.core.scheduler import FLOOR_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.wire import TokenIds
    from penstock.worker.backends.executor import Executor
    from penstock.worker.backends.meters import Meter
    from penstock.worker.core.gate import StepShape
    from penstock.worker.core.plan import StepLimits
    from penstock.worker.kv.cache import KvCache
    from penstock.worker.kv.memory import KvMemory

    _Asked = tuple[Submit, TokenIds, int]  # a request, its answer so far, tokens scored

NOISE_SHARE = 0.05  # measuring is about this good, beside the meter's own noise
# How many tokens an expert gets, and so what each takes, cannot be tried out for all of them.
ROUTED_SHARE = 0.25
_LOGPROBS = 20
_LONG_DECODE = 1024

_GREEDY = Sampling(temperature=0)
# Everything at once that makes the sampler copy its rows.
_DEMANDING = Sampling(**demanding(), logprobs=_LOGPROBS)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class StepShapeTrial:
    """A step to try."""

    decodes: int = 0
    decode_context: int = 1  # what each of them sees
    chunk: int = 0  # tokens of a sequence's prompt
    context: int = 1  # what they see
    scored: int = 0  # tokens of a prompt whose own log-probabilities are asked for
    scored_context: int = 1  # what these see
    demanding: bool = False  # of the sampler
    alike: bool = False  # all tokens the same, so that all go to the same experts
    drafts: int = 0  # of each decode
    prompts: int = 1  # among which the chunk is shared out; of several each sees itself


@dataclass(frozen=True, slots=True)
class StepBounds:
    """How far the trials of a model go."""

    limits: StepLimits
    longest: int  # the longest sequence that can be held
    total: int  # the tokens that can be held
    routes: bool  # tokens go to experts, so that it matters which tokens they are
    long_decodes: bool  # whether a full batch of them is quick enough to be tried
    sampled: int  # rows that the sampler takes at once; with more it needs no more memory
    uneven_rows: tuple[int, int, int]  # where what a step takes bends; see `Backend`
    drafts: int  # of one sequence, at most
    past: int  # tokens before a chunk that are gathered at once; 0: read in place

    @property
    def far(self) -> int:
        """The longest context at whose end a whole chunk may be."""
        tokens = self.limits.tokens
        return min(self.longest, max(tokens, self.limits.pairs // tokens))

    def chunk_at(self, context: int) -> int:
        """The longest chunk at the end of a context."""
        limits = self.limits
        return min(limits.tokens, context, max(FLOOR_TOKENS, limits.pairs // context))

    def _behind(self, chunk: int, past: int) -> int:
        """A context for a shorter chunk: behind `past` tokens, where the past is gathered."""
        return min(self.longest, chunk + past if self.past else chunk)

    @property
    def each(self) -> int:
        """The context of each of a full batch of decodes."""
        most = self.longest if self.long_decodes else min(self.longest, _LONG_DECODE)
        return max(1, min(most, self.total // self.limits.sequences))

    def everything(self) -> StepShapeTrial:
        """The largest step: decodes, a chunk and a scored prompt that sees the longest context.

        No step is larger in any respect, so none is expected to cost more.
        """
        limits, far = self.limits, self.far
        decodes = max(0, limits.sequences - 2)
        chunk = max(0, min(limits.tokens - decodes - self.scored, far))
        return StepShapeTrial(
            decodes, self.each, chunk, far, self.scored, self.longest, demanding=True
        )

    @property
    def scored(self) -> int:
        """Rows of a prompt with log-probabilities, at the end of the longest context."""
        limits = self.limits
        return min(limits.logit_rows - limits.sequences, self.chunk_at(self.longest))

    def full_decode(self) -> StepShapeTrial:
        """As many decodes as a step may have."""
        return StepShapeTrial(self.limits.sequences, self.each, demanding=True)

    def _full_of_drafts(self, share: float = 1.0) -> StepShapeTrial:
        """As many drafts as there may be, of as many sequences as it takes to have them; or a share
        of these."""
        limits = self.limits
        each = max(1, min(self.drafts, self.each - 1))
        rows = min(limits.logit_rows - 1, limits.tokens)
        decodes = max(1, int(share * min(limits.sequences, rows // (1 + each))))
        return StepShapeTrial(decodes, max(1, self.each - each), drafts=each, demanding=True)

    def trials(self) -> Iterator[StepShapeTrial]:
        """Shapes around the border of what a step may be, large and small in turn.

        Within such a border a plane that lies above the measured corners lies above what is
        between them, as long as the cost of a chunk grows with its length, its context and their
        product. The length alone is tried in between as well: what a heap needs for tensors of
        several sizes does not grow evenly with them. What is far away is tried with few rows where
        that shows the same: a whole chunk takes seconds on a CPU.
        """
        limits, far, longest = self.limits, self.far, self.longest
        whole, least = min(limits.tokens, longest), min(FLOOR_TOKENS, limits.tokens, longest)
        yield StepShapeTrial(chunk=whole, context=far)
        yield StepShapeTrial(decodes=1)
        yield self.full_decode()
        yield StepShapeTrial(min(max(8, self.sampled), limits.sequences), self.each, demanding=True)
        yield StepShapeTrial(chunk=self.chunk_at(longest), context=longest)
        yield StepShapeTrial(chunk=least, context=least)
        if self.routes:
            yield StepShapeTrial(chunk=whole, context=whole, alike=True)
        yield StepShapeTrial(1, longest, demanding=True)
        if whole < far:
            yield StepShapeTrial(chunk=whole, context=whole)
        yield StepShapeTrial(chunk=least, context=longest)
        if spare := min(self.drafts, limits.logit_rows - 2, limits.tokens - 1, longest - 1):
            yield StepShapeTrial(1, longest - spare, drafts=spare, demanding=True)
        if self.drafts:
            yield self._full_of_drafts()
            yield self._full_of_drafts(0.5)
        yield StepShapeTrial(scored=self.scored, scored_context=self.scored)
        yield StepShapeTrial(scored=self.scored, scored_context=longest)
        yield StepShapeTrial(limits.sequences)
        yield StepShapeTrial(chunk=max(1, whole // 2), context=max(1, whole // 2))
        # What a chunk needs for its past grows up to what is gathered at once, and then hardly.
        many, of_an_expert, panels = self.uneven_rows
        far_past, past = limits.pairs // panels - panels, self.past
        # Of experts, each takes some rows at once: all of them, when all go to the same.
        bends = (many, past), (of_an_expert, 0), (panels, far_past)
        for some, before in ((whole // 4, past), *bends):
            if least < some < whole:
                yield StepShapeTrial(chunk=some, context=self._behind(some, before), alike=True)
        for some, most in ((whole, far), (least, longest)):
            if past and some + past < most:
                yield StepShapeTrial(chunk=some, context=some + past)
        # Matrix products need more beside them for some numbers of rows than for twice as many.
        decodes = max(1, min(limits.sequences, whole) - 1)
        yield StepShapeTrial(decodes, self.each, whole - decodes, whole, demanding=True)
        # A heap finds room for logits where a long chunk has been, and beside a shorter one not.
        middle = max(0, whole // 4 - decodes)
        yield StepShapeTrial(
            decodes - 1, self.each, middle, whole, self.scored, longest, demanding=True
        )
        yield self.everything()


class Stress:
    """Runs trials on blocks of its own; `close` gives them back."""

    def __init__(
        self,
        executor: Executor,
        memory: KvMemory,
        kv: KvCache,
        meter: Meter,
        tokens: int,
        *,
        noise_share: float = NOISE_SHARE,
    ) -> None:
        self._executor = executor
        self._noise_share = noise_share
        self._kv = kv
        self._meter = meter
        self._block_tokens = memory.block_tokens
        self._blocks = kv.lend(-(-tokens // self._block_tokens) + 1)
        for arena, blocks in zip(memory.arenas, self._blocks, strict=False):
            for view in (view for layer in arena.layers for view in layer.tensors):
                view[blocks] = 0  # not what a sequence has left there
        self._tables = self._blocks[: len(memory.arenas)]
        self._state = np.zeros(1, np.int32)
        if memory.states is not None:
            self._state = np.asarray(self._blocks[-1], np.int32)
            memory.states.bytes_of(int(self._state[0])).zero_()
        self._random = random.Random(0)

    def close(self) -> None:
        """Give the blocks back."""
        self._kv.take_back(self._blocks)

    def run(self, trial: StepShapeTrial, vocabulary: int) -> Measured:
        """One step; its shape and what it may take, by one measurement."""
        shape, took = self.measure(trial, vocabulary)
        size = int(took * (1 + self._noise_share)) + self._meter.noise_bytes
        return Measured(shape.tokens, shape.sequences, shape.context, shape.logit_rows, size)

    def measure(self, trial: StepShapeTrial, vocabulary: int) -> tuple[StepShape, int]:
        """One step; its shape and how far above what was held before it went."""
        plan, asked = self._plan(trial, vocabulary)
        self._meter.drop_caches()
        before = self._meter.held()
        self._meter.mark()
        self._compute(plan, asked)
        return plan.shape, max(0, self._meter.peak() - before)

    def seconds(self, trial: StepShapeTrial, vocabulary: int) -> float:
        """How long one step takes."""
        return self._compute(*self._plan(trial, vocabulary))

    def _compute(self, plan: Plan, asked: list[_Asked]) -> float:
        for request, answered, scored in asked:
            self._executor.admit(request, answered, scored)
        try:
            began = time.perf_counter()
            self._executor.compute(plan)
            return time.perf_counter() - began
        finally:
            for request, _, _ in asked:
                self._executor.forget(request.id)

    def _plan(self, trial: StepShapeTrial, vocabulary: int) -> tuple[Plan, list[_Asked]]:
        plan = Plan()
        asked: list[_Asked] = []
        how = _DEMANDING if trial.demanding else _GREEDY
        # One list for all decodes: the lists of a full batch would be memory of their own.
        ids = self._ids(trial, trial.decode_context, vocabulary)
        for _ in range(trial.decodes):
            piece = self._slice(asked, ids, 1, how, ahead=trial.drafts)
            plan.decodes.append(piece.with_drafts(ids[: trial.drafts], piece.tables))
        for number in range(trial.prompts if trial.chunk else 0):
            count = (trial.chunk + number) // trial.prompts
            seen = max(trial.context, count) if trial.prompts == 1 else count
            ids = self._ids(trial, seen, vocabulary)
            plan.chunks.append(self._slice(asked, ids, count, how))
        if trial.scored:
            ids = self._ids(trial, max(trial.scored_context, trial.scored), vocabulary)
            plan.chunks.append(self._slice(asked, ids, trial.scored, how, scored=True))
        return plan, asked

    def _ids(self, trial: StepShapeTrial, count: int, vocabulary: int) -> list[int]:
        if trial.alike:
            return [0] * count
        return self._random.choices(range(vocabulary), k=count)

    def _slice(
        self,
        asked: list[_Asked],
        ids: list[int],
        count: int,
        how: Sampling,
        *,
        scored: bool = False,
        ahead: int = 0,
    ) -> Slice:
        """The last `count` of a request's tokens, with blocks for `ahead` more; it is one of those
        to be admitted."""
        # One token of prompt, unless it is to be scored: penalties see all that was generated. It
        # is the host that looks at it, which takes time and nothing that every meter reads.
        generated = self._meter.includes_host and not scored
        prompt = ids[:1] if generated else ids
        request = Submit(len(asked), prompt, 1, how, prompt_logprobs=_LOGPROBS if scored else None)
        if how is _DEMANDING:
            # Reasoning that may not be longer: every token but one is ruled out, by a mask.
            request.thinking = Thinking([0], open=True, budget=0)
        start = len(ids) - count
        asked.append((request, ids[len(prompt) :], start if scored else 0))
        needed = -(-(len(ids) + ahead) // self._block_tokens)
        return Slice(
            request_id=request.id,
            start=start,
            tokens=ids[start:],
            tables=tuple(np.resize(np.asarray(b, np.int32), needed) for b in self._tables),
            logit_rows=count if scored else 1,
            samples=True,
            state=self._state,
        )
