"""What runs in the next step: continuous batching with chunked prefill. Holds no tensors.

Two rules carry everything: each running sequence's computed tokens catch up with its known
tokens, and the oldest sequence is never asked to give way. The first makes prefill, decode,
chunking and recomputation one case; the second guarantees progress, because whatever is admitted
fits the pool when it is alone there.

KV that exists is not computed again (`reuse.py`). A sequence that gave way finds its own, unless
somebody needed the room.

Two things bound a step beside its limits. The pool of blocks: a sequence joins when the batch is
expected to fit at its highest, and the youngest gives its blocks back when that was wrong. And the
gate, which knows what a step costs: chunks shrink, then the youngest sit a step out.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING

from penstock.wire import Finish, Reserve
from penstock.worker.kv.prefix import PrefixCache
from penstock.worker.scheduling.gate import StepShape
from penstock.worker.scheduling.lengths import OutputLengths, future_peak_blocks
from penstock.worker.scheduling.plan import Plan, Slice
from penstock.worker.scheduling.reuse import Reuse
from penstock.worker.scheduling.sequence import UNKNOWN, Sequence

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from penstock.wire import Submit
    from penstock.worker.kv.blocks import BlockPool
    from penstock.worker.scheduling.plan import StepLimits
    from penstock.worker.scheduling.policy import StepPacer
    from penstock.worker.scheduling.reuse import Tier

    class Gate(Protocol):
        """Whether a step of a shape has the memory it needs."""

        def admits(self, shape: StepShape) -> bool: ...


FLOOR_TOKENS = 16  # a chunk is not cut below this for want of memory


class Scheduler:
    """Plans steps over a pool of blocks and takes their results back."""

    def __init__(
        self,
        pool: BlockPool,
        limits: StepLimits,
        pacer: StepPacer,
        gate: Gate | None = None,
        tier: Tier | None = None,
    ) -> None:
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
        self.cache = PrefixCache(pool, None if tier is None else tier.keep)
        self._reuse = Reuse(self.cache, tier, limits.block_tokens)
        self._limits = limits
        self._pacer = pacer
        self._gate = gate
        self.lengths = OutputLengths()
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
        """A step would do something, or blocks are being read for one."""
        return bool(self._running or self._waiting)

    def reads(self) -> bool:
        """Blocks are being read for somebody."""
        return any(sequence.ticket is not None for sequence in self._running)

    def place(self, ticket: int, index: int) -> int | None:
        """Where a block that was asked for under a ticket belongs; None: it is not wanted."""
        for sequence in self._running:
            if sequence.ticket == ticket:
                return sequence.blocks[sequence.fetched_from + index]
        return None

    def arrived(self, ticket: int, *, more: bool) -> None:
        """The block that belonged there is in its place; or, without more, no others will come."""
        for sequence in self._running:
            if sequence.ticket == ticket:
                self._reuse.arrived(sequence, more=more)
                return

    def most_tokens(self) -> int:
        """The longest sequence that can ever run here."""
        return self.cache.capacity * self._limits.block_tokens

    def least_blocks(self) -> int:
        """The smallest pool in which all that was taken in can still end, one after the other."""
        known = (*self._running, *self._waiting)
        return max((self._blocks_for(sequence.most_tokens) for sequence in known), default=0)

    def oldest(self) -> Sequence | None:
        """The one that never gives way."""
        return next(iter((*self._running, *self._waiting)), None)

    def add(self, request: Submit) -> None:
        """Take a request; the caller has checked that prompt and output fit `most_tokens`."""
        assert request.prompt, "an empty prompt has no row to sample from"
        assert len(request.prompt) + request.max_tokens <= self.most_tokens(), "can never fit"
        self._arrivals += 1
        sequence = Sequence(request, self._arrivals)
        self._reuse.begin(sequence)
        self._waiting.append(sequence)

    def cancel(self, request_id: int) -> bool:
        """Forget a request and free its blocks; whether it was known."""
        for sequence in (*self._running, *self._waiting):
            if sequence.id == request_id:
                self._learn(sequence)  # a stop string ends an answer in this way too
                self._remove(sequence)
                return True
        return False

    def plan(self, most_tokens: int | None = None) -> Plan:
        """The next step, of at most `most_tokens`.

        Not empty while the oldest fits the pool and nothing is being read for it.
        """
        plan = Plan()
        budget = min(self._limits.tokens, most_tokens or self._limits.tokens)
        most_decodes = self._most_decodes(budget)
        for sequence in list(self._running):
            if len(plan.decodes) == most_decodes:
                break
            # An earlier one may have made this one give way.
            if sequence.decoding and sequence.blocks and self._make_room(sequence, 1, plan):
                plan.decodes.append(Slice(sequence, sequence.computed, 1))
        self._plan_chunks(plan, budget - len(plan.decodes))
        return plan

    def absorb(self, plan: Plan, sampled: dict[int, int], duration_s: float) -> dict[int, Finish]:
        """Take a step's result: the new token of each slice that samples. Who finished, and how."""
        self.advance(plan)
        return self.settle(plan, sampled, duration_s)

    def advance(self, plan: Plan) -> None:
        """A step is on its way: what it will have computed, with tokens that are not known yet."""
        for piece in plan.slices:
            samples = piece.samples
            piece.sequence.computed = piece.end
            self._reuse.make_known(piece.sequence)
            if samples:
                piece.sequence.tokens.append(UNKNOWN)

    def settle(self, plan: Plan, sampled: dict[int, int], duration_s: float) -> dict[int, Finish]:
        """The tokens of a step that was advanced over; another may be on its way by now."""
        self._pacer.observe(len(plan.decodes), plan.chunk_tokens, duration_s)
        finished: dict[int, Finish] = {}
        for piece in plan.slices:
            sequence = piece.sequence
            if sequence.ended or sequence.id not in sampled:
                continue
            token = sampled[sequence.id]
            sequence.tokens[piece.end] = token
            self._reuse.make_known(sequence)
            if end := _finish(sequence, token, piece.end + 1 - sequence.prompt_tokens):
                finished[sequence.id] = end
                del sequence.tokens[piece.end + 1 :]
                self._learn(sequence)
                self._remove(sequence)
        return finished

    def shrink(self) -> None:
        """Have the youngest give way until what is held fits the pool's limit."""
        while self.cache.held > self.cache.capacity and len(self._running) > 1:
            self._preempt(self._running[-1], Plan())
        self.cache.shrink()

    def rename(self, moves: dict[int, int]) -> None:
        """Blocks have been copied elsewhere: old number to new."""
        self.cache.rename(moves)
        for sequence in self._running:
            sequence.blocks = [moves.get(block, block) for block in sequence.blocks]

    def drop_all(self) -> list[int]:
        """Forget everything; the ids of the requests that were here."""
        ids = [sequence.id for sequence in (*self._running, *self._waiting)]
        for request_id in ids:
            self.cancel(request_id)
        return ids

    def check(self) -> None:
        """Blocks and lists agree: nothing leaked, nothing that is shared is written, order kept."""
        self.cache.check(block for sequence in self._running for block in sequence.blocks)
        assert not any(sequence.blocks for sequence in self._waiting), "a waiting one holds blocks"
        # First come, first served, and the youngest gives way: so this one order holds throughout.
        arrivals = [sequence.arrival for sequence in (*self._running, *self._waiting)]
        assert arrivals == sorted(arrivals), "order of arrival is lost"
        for sequence in self._running:
            room = len(sequence.blocks) * self._limits.block_tokens
            assert sequence.computed <= room, "computed tokens without a block"
            to_write = sequence.blocks[sequence.computed // self._limits.block_tokens :]
            assert not any(map(self.cache.is_known, to_write)), "a known block would be written"

    def _most_decodes(self, budget: int) -> int:
        """How many rows of decodes the step has room for, the oldest first."""
        decoding = [sequence for sequence in self._running if sequence.decoding]
        if not decoding:
            return 0
        # While the oldest is not decoding, its chunk must find room beside them.
        oldest = self._running[0]
        base, first = StepShape(), 0
        if not oldest.decoding and not oldest.complete:
            first = min(oldest.pending, FLOOR_TOKENS, max(1, budget - len(decoding)))
            rows = first if oldest.wants_prompt_logits else 1
            base = base.plus(first, oldest.computed + first, rows)
        longest = max(sequence.computed for sequence in decoding) + 1

        def admits(count: int) -> bool:
            return self._gate is None or self._gate.admits(base.plus(count, longest, count, count))

        least = 0 if first else 1  # one row is the smallest step there is
        return _largest(least, max(least, min(len(decoding), budget - first)), admits)

    def _plan_chunks(self, plan: Plan, budget: int) -> None:
        limit = self._pacer.chunk_limit(len(plan.decodes))
        if limit is not None:
            budget = min(budget, limit)
        for sequence in list(self._running):
            if budget <= 0:
                return
            if sequence.ticket is not None:
                continue
            if not sequence.decoding and not sequence.complete and sequence.blocks:
                budget -= self._plan_chunk(sequence, budget, plan)
        while budget > 0 and self._admit():
            if self._running[-1].ticket is None:
                budget -= self._plan_chunk(self._running[-1], budget, plan)

    def _plan_chunk(self, sequence: Sequence, budget: int, plan: Plan) -> int:
        older = itertools.takewhile(lambda other: other is not sequence, self._running)
        if self._reuse.catch_up(sequence, older):
            return 0
        count = min(sequence.pending, budget)
        count = min(count, max(FLOOR_TOKENS, self._limits.pairs // (sequence.computed + count)))
        if sequence.wants_prompt_logits:
            # Every other sequence of the step may still come to need the one row it samples from.
            taken = sum(p.count for p in plan.chunks if p.sequence.wants_prompt_logits)
            count = min(count, self._limits.logit_rows - self._limits.sequences - taken)
        if count > 0:
            count = self._affordable(sequence, count, plan)
        if count <= 0 or not self._make_room(sequence, count, plan):
            return 0
        plan.chunks.append(Slice(sequence, sequence.computed, count))
        return count

    def _affordable(self, sequence: Sequence, count: int, plan: Plan) -> int:
        """The longest chunk up to `count` that the gate admits; 0 when others fill the step."""
        if self._gate is None:
            return count
        shape = plan.shape

        def admits(tokens: int) -> bool:
            assert self._gate is not None
            rows = tokens if sequence.wants_prompt_logits else 1
            return self._gate.admits(shape.plus(tokens, sequence.computed + tokens, rows))

        floor = min(count, FLOOR_TOKENS)
        if sequence is not self._running[0]:
            longest = _largest(floor, count, admits)
            return longest if longest > floor or admits(floor) else 0
        # The oldest always moves: decodes have left it a token, and alone it goes no lower than
        # the floor, which is for the engine to try or to refuse.
        return _largest(1 if plan.slices else floor, count, admits)

    def _admit(self) -> bool:
        """Move the head of the queue to the running ones, if the batch then fits to its end."""
        if not self._waiting or len(self._running) >= self._limits.sequences:
            return False
        sequence = self._waiting[0]
        if sequence.tokens[-1] == UNKNOWN:
            return False  # gave way with a token on its way: the next step knows it
        found = self._reuse.find(sequence)
        held = sum(map(self.cache.is_held, found))
        if self._blocks_for(len(sequence.tokens)) - held > self.cache.free:
            return False
        if self._running and not self._fits_to_the_end(sequence, held):
            return False
        for block in found:
            self.cache.share(block)
        try:
            new = self.cache.take(self._blocks_for(len(sequence.tokens)) - len(found))
        except BaseException:  # when memory fails: the sequence still waits then
            self.cache.give(found)
            raise
        sequence.blocks = found + new
        self._reuse.use(sequence, len(found))
        self._running.append(self._waiting.popleft())
        self._reuse.fetch(sequence)
        return True

    def _fits_to_the_end(self, newcomer: Sequence, shared: int) -> bool:
        """Whether the batch with the newcomer, who shares so many blocks, fits at its highest."""
        batch = (*self._running, newcomer)
        # Blocks with several holders are there once. Who leaves takes no more of them away than
        # it stands for in the sums below.
        capacity = self.cache.capacity + shared - self.cache.held
        capacity += sum(len(sequence.blocks) for sequence in self._running)
        # Whatever they come to: enough in itself, and all that counts without trust in lengths.
        if sum(self._blocks_for(s.most_tokens) for s in batch) <= capacity:
            return True
        if self._limits.reserve is Reserve.WORST_CASE:
            return False
        expected = []
        for sequence in batch:
            left = sequence.most_tokens - len(sequence.tokens)
            to_come = min(left, int(self.lengths.remaining(sequence.generated)))
            expected.append((len(sequence.tokens), to_come))
        return future_peak_blocks(expected, self._limits.block_tokens) <= capacity

    def _make_room(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Blocks for `count` more tokens, taken from younger sequences if need be."""
        missing = self._blocks_for(sequence.computed + count) - len(sequence.blocks)
        if missing <= 0:
            return True
        while self.cache.free < missing:
            youngest = self._running[-1]
            self._preempt(youngest, plan)
            if youngest is sequence:
                return False
        sequence.blocks += self.cache.take(missing)
        return True

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        """Take a sequence's blocks; what nobody needs is found again, the rest computed again."""
        self._running.remove(sequence)
        self._free(sequence)
        sequence.computed = sequence.known = 0
        sequence.preempted += 1
        self.preemptions += 1
        self._waiting.appendleft(sequence)
        plan.decodes = [piece for piece in plan.decodes if piece.sequence is not sequence]
        plan.chunks = [piece for piece in plan.chunks if piece.sequence is not sequence]

    def _learn(self, sequence: Sequence) -> None:
        # An answer that may have one token, such as a probe's, tells nothing.
        if sequence.generated and sequence.request.max_tokens > 1:
            self.lengths.observe(sequence.generated)

    def _remove(self, sequence: Sequence) -> None:
        """Forget a sequence, which may have given way while its last token was on its way."""
        sequence.ended = True
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        self._reuse.end(sequence)
        self.cache.give(sequence.blocks)
        sequence.blocks = []

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._limits.block_tokens)


def _largest(least: int, most: int, admits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that is admitted; `least` if none above it is."""
    if most <= least or admits(most):
        return most
    while most - least > 1:  # nothing from `most` on is admitted
        middle = (least + most) // 2
        least, most = (middle, most) if admits(middle) else (least, middle)
    return least


def _finish(sequence: Sequence, token: int, generated: int) -> Finish | None:
    request = sequence.request
    if token in request.stop_token_ids and generated > request.min_tokens:
        return Finish.STOP
    if generated >= request.max_tokens:
        return Finish.LENGTH
    return None
