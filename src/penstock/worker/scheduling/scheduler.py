"""What runs in the next step: continuous batching with chunked prefill. Holds no tensors.

Two rules carry everything: each running sequence's computed tokens catch up with its known
tokens, and the oldest sequence is never asked to give way. The first makes prefill, decode,
chunking and recomputation one case; the second guarantees progress, because whatever is admitted
fits the pool when it is alone there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.wire import Finish
from penstock.worker.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from penstock.wire import Submit
    from penstock.worker.kv.blocks import BlockPool
    from penstock.worker.scheduling.policy import StepPacer


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may hold."""

    tokens: int
    sequences: int
    block_tokens: int
    logit_rows: int  # rows whose logits are computed: bounds the [rows, vocabulary] matrix


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens `start .. start + count` of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """The last known token is in it, so its row gives the next one."""
        return self.end == len(self.sequence.tokens)

    @property
    def logit_rows(self) -> int:
        """How many of its rows need logits."""
        return self.count if self.sequence.wants_prompt_logits else int(self.samples)


@dataclass(slots=True)
class Plan:
    """One step's work: sequences that decode first, then chunks, each group by arrival."""

    decodes: list[Slice] = field(default_factory=list)
    chunks: list[Slice] = field(default_factory=list)

    @property
    def slices(self) -> list[Slice]:
        """All of it, in batch order."""
        return self.decodes + self.chunks

    @property
    def tokens(self) -> int:
        """Rows of the forward."""
        return len(self.decodes) + self.chunk_tokens

    @property
    def chunk_tokens(self) -> int:
        """Rows that are not decodes."""
        return sum(piece.count for piece in self.chunks)


class Scheduler:
    """Plans steps over a pool of blocks and takes their results back."""

    def __init__(self, pool: BlockPool, limits: StepLimits, pacer: StepPacer) -> None:
        if limits.tokens <= limits.sequences:
            raise ValueError(
                f"a step of {limits.tokens} tokens has no room for a chunk beside "
                f"{limits.sequences} decoding sequences: raise step_tokens or lower step_sequences"
            )
        if limits.logit_rows <= limits.sequences:
            raise ValueError(
                f"{limits.logit_rows} rows of logits leave none for prompt log-probabilities "
                f"beside {limits.sequences} sequences that sample"
            )
        self._pool = pool
        self._limits = limits
        self._pacer = pacer
        self._running: list[Sequence] = []  # by arrival, always
        self._waiting: deque[Sequence] = deque()  # by arrival, always
        self._arrivals = 0
        self.preemptions = 0

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that hold none."""
        return len(self._waiting)

    def has_work(self) -> bool:
        """A step would do something."""
        return bool(self._running or self._waiting)

    def most_tokens(self) -> int:
        """The longest sequence that can ever run here."""
        return self._pool.capacity * self._limits.block_tokens

    def add(self, request: Submit) -> None:
        """Take a request; the caller has checked that prompt and output fit `most_tokens`."""
        assert request.prompt, "an empty prompt has no row to sample from"
        assert len(request.prompt) + request.max_tokens <= self.most_tokens(), "can never fit"
        self._arrivals += 1
        self._waiting.append(Sequence(request, self._arrivals))

    def cancel(self, request_id: int) -> bool:
        """Forget a request and free its blocks; whether it was known."""
        for group in (self._running, self._waiting):
            for sequence in group:
                if sequence.id == request_id:
                    group.remove(sequence)
                    self._free(sequence)
                    return True
        return False

    def plan(self) -> Plan:
        """The next step. Not empty while there is work."""
        plan = Plan()
        for sequence in list(self._running):
            # An earlier one may have made this one give way.
            if sequence.decoding and sequence.blocks and self._make_room(sequence, 1, plan):
                plan.decodes.append(Slice(sequence, sequence.computed, 1))
        self._plan_chunks(plan)
        return plan

    def absorb(self, plan: Plan, sampled: dict[int, int], duration_s: float) -> dict[int, Finish]:
        """Take a step's result: the new token of each slice that samples. Who finished, and how."""
        self._pacer.observe(len(plan.decodes), plan.chunk_tokens, duration_s)
        finished: dict[int, Finish] = {}
        for piece in plan.slices:
            sequence = piece.sequence
            samples = piece.samples
            sequence.computed = piece.end
            if not samples:
                continue
            token = sampled[sequence.id]
            sequence.tokens.append(token)
            if end := _finish(sequence, token):
                finished[sequence.id] = end
                self._running.remove(sequence)
                self._free(sequence)
        return finished

    def drop_all(self) -> list[int]:
        """Forget everything; the ids of the requests that were here."""
        ids = [sequence.id for sequence in (*self._running, *self._waiting)]
        for request_id in ids:
            self.cancel(request_id)
        return ids

    def check(self) -> None:
        """Blocks and lists agree: nothing leaked, nothing shared, order kept."""
        self._pool.check()
        held = [block for sequence in self._running for block in sequence.blocks]
        assert len(held) == len(set(held)), "two sequences share a block"
        assert len(held) == self._pool.capacity - self._pool.free, "a block has no owner"
        assert not any(sequence.blocks for sequence in self._waiting), "a waiting one holds blocks"
        # First come, first served, and the youngest gives way: so this one order holds throughout.
        arrivals = [sequence.arrival for sequence in (*self._running, *self._waiting)]
        assert arrivals == sorted(arrivals), "order of arrival is lost"
        for sequence in self._running:
            room = len(sequence.blocks) * self._limits.block_tokens
            assert sequence.computed <= room, "computed tokens without a block"

    def _plan_chunks(self, plan: Plan) -> None:
        budget = self._limits.tokens - len(plan.decodes)
        limit = self._pacer.chunk_limit(len(plan.decodes))
        if limit is not None:
            budget = min(budget, limit)
        for sequence in list(self._running):
            if budget <= 0:
                return
            if not sequence.decoding and sequence.blocks:
                budget -= self._plan_chunk(sequence, budget, plan)
        while budget > 0 and self._admit():
            budget -= self._plan_chunk(self._running[-1], budget, plan)

    def _plan_chunk(self, sequence: Sequence, budget: int, plan: Plan) -> int:
        count = min(sequence.pending, budget)
        if sequence.wants_prompt_logits:
            # Every other sequence of the step may still come to need the one row it samples from.
            taken = sum(p.count for p in plan.chunks if p.sequence.wants_prompt_logits)
            count = min(count, self._limits.logit_rows - self._limits.sequences - taken)
        if count <= 0 or not self._make_room(sequence, count, plan):
            return 0
        plan.chunks.append(Slice(sequence, sequence.computed, count))
        return count

    def _admit(self) -> bool:
        """Move the head of the queue to the running ones, if all its known tokens find room."""
        if not self._waiting or len(self._running) >= self._limits.sequences:
            return False
        sequence = self._waiting[0]
        # Room for the whole prompt and a block to grow into: less would only be taken back soon.
        wanted = min(self._blocks_for(len(sequence.tokens)) + 1, self._pool.capacity)
        if self._pool.free < wanted and self._running:
            return False
        # Taking may fail, when memory does: the sequence still waits then.
        sequence.blocks = self._pool.take(self._blocks_for(len(sequence.tokens)))
        self._running.append(self._waiting.popleft())
        return True

    def _make_room(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Blocks for `count` more tokens, taken from younger sequences if need be."""
        missing = self._blocks_for(sequence.computed + count) - len(sequence.blocks)
        if missing <= 0:
            return True
        while self._pool.free < missing:
            youngest = self._running[-1]
            self._preempt(youngest, plan)
            if youngest is sequence:
                return False
        sequence.blocks += self._pool.take(missing)
        return True

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        """Take a sequence's blocks; its KV is computed again when there is room."""
        self._running.remove(sequence)
        self._free(sequence)
        sequence.computed = 0
        sequence.preempted += 1
        self.preemptions += 1
        self._waiting.appendleft(sequence)
        plan.decodes = [piece for piece in plan.decodes if piece.sequence is not sequence]
        plan.chunks = [piece for piece in plan.chunks if piece.sequence is not sequence]

    def _free(self, sequence: Sequence) -> None:
        self._pool.give(sequence.blocks)
        sequence.blocks = []

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._limits.block_tokens)


def _finish(sequence: Sequence, token: int) -> Finish | None:
    request = sequence.request
    if token in request.stop_token_ids and sequence.generated > request.min_tokens:
        return Finish.STOP
    if sequence.generated >= request.max_tokens:
        return Finish.LENGTH
    return None
