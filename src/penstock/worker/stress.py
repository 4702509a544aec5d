"""Steps that no request asked for, run through the real executor to see what they cost.

Their sequences share a few blocks: what a step takes beyond KV depends on how much it sees, not on
what stands there. So the longest context can be tried before there is memory for it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.memory.cost import Measured
from penstock.wire import Sampling, Submit, Thinking
from penstock.worker.models.kernels.cpu_memory import EXPERT_ROWS, MANY_ROWS
from penstock.worker.scheduling.plan import Plan, Slice
from penstock.worker.scheduling.scheduler import FLOOR_TOKENS
from penstock.worker.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.worker.engine.cuda_executor import CudaExecutor
    from penstock.worker.engine.executor import Executor
    from penstock.worker.kv.arena import Arena
    from penstock.worker.kv.blocks import BlockPool
    from penstock.worker.meter import Meter
    from penstock.worker.scheduling.gate import StepShape
    from penstock.worker.scheduling.plan import StepLimits

# Measuring is about this good. What a heap hands out depends a little on what came before, and
# pages are counted per processor and summed up now and then. Of a GPU torch takes pieces of 20 MiB,
# and of 2 for small tensors: a step between two that were measured may need one more of them, and
# what little a step leaves behind may hold another.
_RAM_NOISE_BYTES = 5 << 18
_GPU_NOISE_BYTES = 44 << 20
_NOISE_SHARE = 0.05
# How many tokens an expert gets, and so what each takes, cannot be tried out for all of them.
_ROUTED_SHARE = 0.25
_LOGPROBS = 20
# Rows of which a matrix product on a CPU makes its copy in two pieces, the first being 384: a line
# from shorter to longer chunks lies below what it takes there.
_BEYOND_A_PANEL = 392
_LONG_DECODE = 1024

_GREEDY = Sampling(temperature=0)
# Everything at once that makes the sampler copy its rows.
_DEMANDING = Sampling(
    temperature=0.8,
    top_p=0.9,
    top_k=40,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logprobs=_LOGPROBS,
)


@dataclass(frozen=True, slots=True)
class Trial:
    """A step to try."""

    decodes: int = 0
    decode_context: int = 1  # what each of them sees
    chunk: int = 0  # tokens of a sequence's prompt
    context: int = 1  # what they see
    scored: int = 0  # tokens of a prompt whose own log-probabilities are asked for
    scored_context: int = 1  # what these see
    demanding: bool = False  # of the sampler
    alike: bool = False  # all tokens the same, so that all go to the same experts
    prompts: int = 1  # among which the chunk is shared out; of several each sees itself


@dataclass(frozen=True, slots=True)
class Reach:
    """How far the trials of a model go."""

    limits: StepLimits
    longest: int  # the longest sequence that can be held
    total: int  # the tokens that can be held
    routes: bool  # tokens go to experts, so that it matters which tokens they are
    in_ram: bool  # where decodes read KV in place, and a full batch of long ones takes seconds
    sampled: int  # rows that the sampler takes at once; with more it needs no more memory
    past: int  # tokens before a chunk that are gathered at once, in RAM

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
        """A context at whose end a shorter chunk is tried: in RAM behind so much as `past`."""
        return min(self.longest, chunk + past if self.in_ram else chunk)

    @property
    def each(self) -> int:
        """The context of each of a full batch of decodes."""
        most = min(self.longest, _LONG_DECODE) if self.in_ram else self.longest
        return max(1, min(most, self.total // self.limits.sequences))

    def everything(self) -> Trial:
        """The largest step: decodes, a chunk and a scored prompt that sees the longest context.

        No step is larger in any respect, so none is expected to cost more.
        """
        limits, far = self.limits, self.far
        decodes = max(0, limits.sequences - 2)
        chunk = max(0, min(limits.tokens - decodes - self.scored, far))
        return Trial(decodes, self.each, chunk, far, self.scored, self.longest, demanding=True)

    @property
    def scored(self) -> int:
        """Rows of a prompt with log-probabilities, at the end of the longest context."""
        limits = self.limits
        return min(limits.logit_rows - limits.sequences, self.chunk_at(self.longest))

    def full_decode(self) -> Trial:
        """As many decodes as a step may have."""
        return Trial(self.limits.sequences, self.each, demanding=True)

    def trials(self) -> Iterator[Trial]:
        """Shapes around the border of what a step may be, large and small in turn.

        Within such a border a plane that lies above the measured corners lies above what is
        between them, as long as the cost of a chunk grows with its length, its context and their
        product. The length alone is tried in between as well: what a heap needs for tensors of
        several sizes does not grow evenly with them. What is far away is tried with few rows where
        that shows the same: a whole chunk takes seconds on a CPU.
        """
        limits, far, longest = self.limits, self.far, self.longest
        whole, least = min(limits.tokens, longest), min(FLOOR_TOKENS, limits.tokens, longest)
        yield Trial(chunk=whole, context=far)
        yield Trial(decodes=1)
        yield self.full_decode()
        yield Trial(min(max(8, self.sampled), limits.sequences), self.each, demanding=True)
        yield Trial(chunk=self.chunk_at(longest), context=longest)
        yield Trial(chunk=least, context=least)
        if self.routes:
            yield Trial(chunk=whole, context=whole, alike=True)
        yield Trial(1, longest, demanding=True)
        if whole < far:
            yield Trial(chunk=whole, context=whole)
        yield Trial(chunk=least, context=longest)
        yield Trial(scored=self.scored, scored_context=self.scored)
        yield Trial(scored=self.scored, scored_context=longest)
        yield Trial(limits.sequences)
        yield Trial(chunk=max(1, whole // 2), context=max(1, whole // 2))
        # What a chunk needs for its past grows up to what is gathered at once, and then hardly.
        far_past, past = limits.pairs // _BEYOND_A_PANEL - _BEYOND_A_PANEL, self.past
        # Of experts, each takes some rows at once: all of them, when all go to the same.
        bends = (MANY_ROWS, past), (EXPERT_ROWS, 0), (_BEYOND_A_PANEL, far_past)
        for some, before in ((whole // 4, past), *bends):
            if least < some < whole:
                yield Trial(chunk=some, context=self._behind(some, before), alike=True)
        for some, most in ((whole, far), (least, longest)):
            if self.in_ram and some + past < most:
                yield Trial(chunk=some, context=some + past)
        # Matrix products need more beside them for some numbers of rows than for twice as many.
        decodes = max(1, min(limits.sequences, whole) - 1)
        yield Trial(decodes, self.each, whole - decodes, whole, demanding=True)
        # A heap finds room for logits where a long chunk has been, and beside a shorter one not.
        middle = max(0, whole // 4 - decodes)
        yield Trial(decodes - 1, self.each, middle, whole, self.scored, longest, demanding=True)
        yield self.everything()


class Stress:
    """Runs trials on blocks of its own; `close` gives them back."""

    def __init__(
        self,
        executor: Executor | CudaExecutor,
        arena: Arena,
        pool: BlockPool,
        meter: Meter,
        tokens: int,
        *,
        routes: bool = False,
    ) -> None:
        self._executor = executor
        self._noise_share = _ROUTED_SHARE if routes else _NOISE_SHARE
        self._in_ram = arena.in_ram
        self._noise_bytes = _RAM_NOISE_BYTES if arena.in_ram else _GPU_NOISE_BYTES
        self._pool = pool
        self._meter = meter
        self._block_tokens = arena.layout.block_tokens
        self._blocks = pool.take(min(pool.free, -(-tokens // self._block_tokens) + 1))
        for view in (*arena.keys, *arena.values):
            view[self._blocks] = 0  # not what a sequence has left there
        self._random = random.Random(0)

    def close(self) -> None:
        """Give the blocks back."""
        self._pool.give(self._blocks)
        self._blocks = []

    def run(self, trial: Trial, vocabulary: int) -> Measured:
        """One step; its shape and what it may take, by one measurement."""
        shape, took = self.measure(trial, vocabulary)
        size = int(took * (1 + self._noise_share)) + self._noise_bytes
        return Measured(shape.tokens, shape.sequences, shape.context, shape.logit_rows, size)

    def measure(self, trial: Trial, vocabulary: int) -> tuple[StepShape, int]:
        """One step; its shape and how far above what was held before it went."""
        plan = self._plan(trial, vocabulary)
        self._meter.drop_caches()
        before = self._meter.held()
        self._meter.mark()
        masked = [
            piece.sequence.request for piece in plan.slices if piece.sequence.request.thinking
        ]
        for request in masked:
            self._executor.admit(request)
        try:
            self._executor.compute(plan)
        finally:
            for request in masked:
                self._executor.forget(request.id)
        return plan.shape, max(0, self._meter.peak() - before)

    def _plan(self, trial: Trial, vocabulary: int) -> Plan:
        plan = Plan()
        how = _DEMANDING if trial.demanding else _GREEDY
        # One list for all decodes: the lists of a full batch would be memory of their own.
        ids = self._ids(trial, trial.decode_context, vocabulary)
        for number in range(trial.decodes):
            plan.decodes.append(Slice(self._sequence(number, ids, how), len(ids) - 1, 1))
        for number in range(trial.prompts if trial.chunk else 0):
            count = (trial.chunk + number) // trial.prompts
            seen = max(trial.context, count) if trial.prompts == 1 else count
            ids = self._ids(trial, seen, vocabulary)
            sequence = self._sequence(len(plan.slices), ids, how)
            plan.chunks.append(Slice(sequence, len(ids) - count, count))
        if trial.scored:
            ids = self._ids(trial, max(trial.scored_context, trial.scored), vocabulary)
            sequence = self._sequence(len(plan.slices), ids, how, prompt_logprobs=_LOGPROBS)
            sequence.scored = start = len(ids) - trial.scored
            plan.chunks.append(Slice(sequence, start, trial.scored))
        return plan

    def _ids(self, trial: Trial, count: int, vocabulary: int) -> list[int]:
        if trial.alike:
            return [0] * count
        return self._random.choices(range(vocabulary), k=count)

    def _sequence(
        self, number: int, ids: list[int], how: Sampling, prompt_logprobs: int | None = None
    ) -> Sequence:
        # One token of prompt, unless it is to be scored: penalties see all that was generated. It
        # is the host that looks at it, which for a GPU takes time and nothing that is measured.
        generated = self._in_ram and prompt_logprobs is None
        prompt = ids[:1] if generated else ids
        request = Submit(number, prompt, 1, how, prompt_logprobs=prompt_logprobs)
        if how is _DEMANDING and self._executor.constrains:
            # Reasoning that may not be longer: every token but one is ruled out, by a mask.
            request.thinking = Thinking([0], open=True, budget=0)
        sequence = Sequence(request, number)
        sequence.tokens = ids
        needed = -(-len(ids) // self._block_tokens)
        repeats = -(-needed // len(self._blocks))
        sequence.blocks = (self._blocks * repeats)[:needed]
        return sequence
