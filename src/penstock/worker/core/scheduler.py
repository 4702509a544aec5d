"""What runs in the next step: continuous batching with chunked prefill. Holds no tensors.

Two rules carry everything: each running sequence's computed tokens catch up with its known
tokens, and the oldest sequence is never asked to give way. The first makes prefill, decode,
chunking and recomputation one case; the second guarantees progress, because whatever is admitted
fits the pool when it is alone there.

KV that exists is not computed again: a sequence begins with what `KvCache` has of its first tokens,
its own if it gave way, and lets an older one that is computing the same beginning go ahead.

Two things bound a step beside its limits. KV: a sequence joins when the batch is expected to fit at
its highest, and the youngest gives its blocks back when that was wrong. And the gate, which knows
what a step costs: chunks shrink, then the youngest sit a step out. Drafts get what is left then.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING

from penstock.wire import Reserve, token_ids
from penstock.worker.core.borders import Borders
from penstock.worker.core.drafts.drafting import Drafting, Room
from penstock.worker.core.gate import StepShape, largest
from penstock.worker.core.lengths import OutputLengths
from penstock.worker.core.plan import UNKNOWN, Plan
from penstock.worker.core.sequence import Ended, Sequence
from penstock.worker.core.shared_tokens import SharedTokens

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from penstock.wire import Submit
    from penstock.worker.core.gate import Gate
    from penstock.worker.core.pacer import StepPacer
    from penstock.worker.core.plan import StepLimits
    from penstock.worker.kv.cache import KvCache

# Who comes behind others (`Submit.priority`) leaves one part in so many of the KV to them.
KEPT_SHARE = 8
FLOOR_TOKENS = 16  # a chunk is not cut below this for want of memory


class Scheduler:
    """Plans steps over the KV there is, and takes their results back."""

    def __init__(
        self,
        kv: KvCache,
        limits: StepLimits,
        pacer: StepPacer,
        gate: Gate | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        limits.check()
        self._kv = kv
        self._borders = Borders(kv)
        self._shared = SharedTokens()
        self._limits = limits
        self._pacer = pacer
        self._gate = gate
        self.drafting = drafting or Drafting()
        self.lengths = OutputLengths()
        self._arrivals = 0
        self._sequences: dict[int, Sequence] = {}  # by request id
        self._running: list[Sequence] = []  # by arrival, always
        self._waiting: deque[Sequence] = deque()  # by arrival, always
        self._held: Collection[int] = ()  # requests that take part in no step
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

    def fetches(self) -> bool:
        """Blocks are being brought for somebody."""
        return any(sequence.kv.fetching for sequence in self._running)

    def min_bytes(self) -> int:
        """The least KV in which all that was taken in can still end, one after the other."""
        known = self._sequences.values()
        return max((self._kv.need_bytes(sequence.max_tokens) for sequence in known), default=0)

    def find(self, request_id: int) -> Sequence | None:
        """A request that is here."""
        return self._sequences.get(request_id)

    def oldest(self) -> Sequence | None:
        """The one that never gives way."""
        return next(itertools.chain(self._running, self._waiting), None)

    def add(self, request: Submit) -> None:
        """Take a request; the caller has checked that prompt and output fit the KV."""
        assert request.prompt, "an empty prompt has no row to sample from"
        assert len(request.prompt) + request.max_tokens <= self._kv.max_tokens(), "can never fit"
        self._arrivals += 1
        sequence = Sequence(request, self._arrivals, self._shared.set(request.stop_token_ids))
        sequence.kv = self._kv.open(sequence.tokens, request.salt, request.media)
        self._sequences[request.id] = sequence
        place = len(self._waiting)
        while place and (other := self._waiting[place - 1]).request.priority > request.priority:
            # As if it had come before those that it passes.
            sequence.arrival, other.arrival = other.arrival, sequence.arrival
            place -= 1
        self._waiting.insert(place, sequence)

    def cancel(self, request_id: int) -> bool:
        """Forget a request and free its blocks; whether it was known."""
        if (sequence := self._sequences.get(request_id)) is None:
            return False
        self._learn(sequence)  # a stop string ends an answer in this way too
        self._remove(sequence)
        return True

    def plan(self, max_tokens: int | None = None, held: Collection[int] = ()) -> Plan:
        """The next step, of at most `max_tokens`, without requests that are `held`.

        Not empty while the oldest fits the KV and waits for nothing.
        """
        self._held = held
        self.drafting.withdraw(self._kv)
        self._borders.withdraw(self._running)
        for sequence in self._running:
            if sequence.kv.computed > sequence.computed:  # brought by a fetch
                self._use_found(sequence)
        while self._admit():
            pass
        plan = Plan()
        budget = min(self._limits.tokens, max_tokens or self._limits.tokens)
        max_decodes = self._max_decodes(budget)
        for sequence in list(self._running):
            if len(plan.decodes) == max_decodes:
                break
            # An earlier one may have made this one give way.
            if not self._decodes(sequence) or not sequence.running:
                continue
            if self._make_room(sequence, 1, plan):
                plan.decodes.append(sequence.slice(1))
        self._plan_chunks(plan, budget - len(plan.decodes))
        room = Room(self._kv, self._limits, self._gate, budget, scarce=bool(self._waiting))
        self.drafting.extend(plan, self._sequences, room)
        self._borders.extend(plan, self._sequences)
        return plan

    def advance(self, plan: Plan, late: Collection[int] = ()) -> None:
        """A step is on its way: what it will have computed, with tokens that are not known yet.

        For requests that are `late` it samples nothing: their last row is computed once more.
        """
        for piece in plan.slices:
            sequence = self._sequences[piece.request_id]
            samples = piece.samples and piece.request_id not in late
            sequence.computed = piece.end - (piece.samples and not samples)
            self._kv.commit(sequence.kv, sequence.computed, sequence.known_tokens)
            if samples:
                sequence.tokens.append(UNKNOWN)
        self.lose_states(late)

    def lose_states(self, requests: Collection[int]) -> None:
        """Rows that do not count are in the states of these: they and all younger ones give way."""
        while self._borders.any and any(s.id in requests for s in self._running):
            self._preempt(self._running[-1], Plan())

    def absorb(
        self, plan: Plan, sampled: Mapping[int, list[int]], duration_s: float
    ) -> dict[int, Ended]:
        """The tokens of a step that was advanced over; another may be on its way by now. Who
        finished, and how."""
        self._pacer.observe(len(plan.decodes), plan.chunk_tokens, duration_s, plan.drafts)
        self.drafting.observe(plan, sampled, duration_s)
        finished: dict[int, Ended] = {}
        for piece in plan.slices:
            sequence = self._sequences.get(piece.request_id)
            tokens = sampled.get(piece.request_id)
            if sequence is None or not tokens:
                continue
            count, how = sequence.cut(tokens, piece.end + 1 - sequence.prompt_tokens)
            end = piece.end + count
            sequence.tokens[piece.end : piece.end + 1] = token_ids(tokens[:count])
            if piece.drafts and sequence.computed == piece.end:  # it has not given way since
                sequence.computed = end - 1
            self._kv.commit(sequence.kv, sequence.computed, sequence.known_tokens)
            if how is not None:
                finished[sequence.id] = Ended(how, count)
                del sequence.tokens[end:]
                self._learn(sequence)
                self._remove(sequence)
        self.drafting.withdraw(self._kv)
        return finished

    def shrink(self) -> None:
        """Have the youngest give way until what is held fits the KV's limit."""
        while self._kv.held_bytes > self._kv.capacity_bytes and len(self._running) > 1:
            self._preempt(self._running[-1], Plan())

    def check(self) -> None:
        """Blocks and lists agree: nothing leaked, nothing that is shared is written, order kept."""
        self._kv.check()
        assert not any(sequence.running for sequence in self._waiting), "a waiting one has blocks"
        # First come, first served, and the youngest gives way: so this one order holds throughout.
        arrivals = [sequence.arrival for sequence in (*self._running, *self._waiting)]
        assert arrivals == sorted(arrivals), "order of arrival is lost"
        assert len(arrivals) == len(self._sequences), "a request is lost"
        for sequence in self._running:
            if not sequence.kv.fetching:
                computed = max(sequence.computed, sequence.kv.computed)
                self._kv.check_writable(sequence.kv, computed)

    def _max_decodes(self, budget: int) -> int:
        """How many rows of decodes the step has room for, the oldest first."""
        decoding = [sequence for sequence in self._running if self._decodes(sequence)]
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
        return largest(least, max(least, min(len(decoding), budget - first)), admits)

    def _plan_chunks(self, plan: Plan, budget: int) -> None:
        """Half for the oldest prompt, so that it ends; the rest for the others, short ones first:
        a long prompt does not hold them up."""
        prompts = [sequence for sequence in self._running if self._prefills(sequence)]
        if not prompts or budget <= 0:
            return
        oldest, *others = prompts
        limit = self._pacer.chunk_limit(len(plan.decodes), len(prompts))
        if limit is not None:
            budget = min(budget, max(limit, 2 * FLOOR_TOKENS) if others else limit)
        wanted = sum(sequence.pending for sequence in others)
        count = max(budget - wanted, budget // 2, min(budget, FLOOR_TOKENS))
        budget -= self._plan_chunk(oldest, count, plan)
        for sequence in sorted(others, key=lambda s: (s.request.priority, s.pending)):
            # An earlier one may have made this one give way.
            if budget > 0 and sequence.running:
                budget -= self._plan_chunk(sequence, budget, plan)

    def _prefills(self, sequence: Sequence) -> bool:
        if sequence.kv.fetching or sequence.id in self._held:
            return False
        return not (sequence.decoding or sequence.complete or self._follows(sequence))

    def _plan_chunk(self, sequence: Sequence, budget: int, plan: Plan) -> int:
        count = min(sequence.pending, budget)
        count = min(count, max(FLOOR_TOKENS, self._limits.pairs // (sequence.computed + count)))
        if sequence.wants_prompt_logits:
            # Every other sequence of the step may still come to need the one row it samples from.
            taken = sum(p.logit_rows for p in plan.chunks if p.logit_rows == p.count > 1)
            count = min(count, self._limits.logit_rows - self._limits.sequences - taken)
        if count > 0:
            count = self._affordable(sequence, count, plan)
        if count > 0:  # blocks for a long chunk may be there for a part of it only
            start, kv = sequence.computed, self._kv
            floor = min(count, FLOOR_TOKENS)
            count = largest(floor, count, lambda n: kv.extendable(sequence.kv, start + n))
        if count <= 0 or not self._make_room(sequence, count, plan):
            return 0
        plan.chunks.append(sequence.slice(count))
        return count

    def _follows(self, sequence: Sequence) -> bool:
        """Use what others have computed by now; whether an older one is at the next block, so that
        the sequence had better wait for it."""
        self._kv.catch_up(sequence.kv, sequence.computed, sequence.reusable_tokens)
        if sequence.kv.computed > sequence.computed:
            self._use_found(sequence)
        return self._borders.awaits(sequence, self._running)

    def _use_found(self, sequence: Sequence) -> None:
        """Its first tokens were found computed."""
        sequence.computed = sequence.kv.computed
        if not sequence.preempted:  # what it had computed itself is not counted
            sequence.reused = sequence.computed

    def _affordable(self, sequence: Sequence, count: int, plan: Plan) -> int:
        """The longest chunk up to `count` that the gate admits; 0 when others fill the step."""
        gate, shape = self._gate, plan.shape
        if gate is None:
            return count

        def admits(tokens: int) -> bool:
            rows = tokens if sequence.wants_prompt_logits else 1
            return gate.admits(shape.plus(tokens, sequence.computed + tokens, rows))

        floor = min(count, FLOOR_TOKENS)
        if sequence is not self._running[0]:
            longest = largest(floor, count, admits)
            return longest if longest > floor or admits(floor) else 0
        # The oldest always moves: decodes have left it a token, and alone it goes no lower than
        # the floor, which is for the engine to try or to refuse.
        return largest(1 if plan.slices else floor, count, admits)

    def _admit(self) -> bool:
        """Move the head of the queue to the running ones, if the batch then fits to its end."""
        if not self._waiting or len(self._running) >= self._limits.sequences:
            return False
        sequence, kv = self._waiting[0], self._kv
        if sequence.id in self._held or sequence.tokens[-1] == UNKNOWN:
            return False  # the latter gave way with a token on its way: the next step knows it
        match = kv.match(sequence.kv, sequence.reusable_tokens)
        kept = 0
        if self._running and sequence.request.priority > 0:
            kept = kv.capacity_bytes // KEPT_SHARE
        needed = kv.need_bytes(len(sequence.tokens)) - match.held_bytes
        if needed > kv.capacity_bytes - kv.held_bytes - kept:
            return False
        if self._running and not self._fits_to_the_end(sequence, match.held_bytes - kept):
            return False
        # When memory fails the sequence still waits.
        if self._running and not kv.back(match, len(sequence.tokens)):
            return False  # its memory comes piece by piece, beside the steps of the others
        kv.admit(sequence.kv, match, len(sequence.tokens), fetch=not sequence.wants_prompt_logits)
        sequence.running = True
        self._use_found(sequence)
        self._borders.joins(sequence, match, self._running)
        self._running.append(self._waiting.popleft())
        return True

    def _fits_to_the_end(self, newcomer: Sequence, shared_bytes: int) -> bool:
        """Whether the batch with the newcomer, who shares so much (less than nothing: some is kept
        for others), fits at its highest."""
        batch, kv = (*self._running, newcomer), self._kv
        # Blocks with several holders are there once. Who leaves takes no more of them away than
        # it stands for in the sums below.
        capacity = kv.capacity_bytes + shared_bytes - kv.held_bytes
        capacity += sum(kv.bytes_of(sequence.kv) for sequence in self._running)
        # Whatever they come to: enough in itself, and all that counts without trust in lengths.
        if sum(kv.need_bytes(sequence.max_tokens) for sequence in batch) <= capacity:
            return True
        if self._limits.reserve is Reserve.WORST_CASE:
            return False
        expected = []
        for sequence in batch:
            left = sequence.max_tokens - len(sequence.tokens)
            to_come = min(left, int(self.lengths.remaining(sequence.generated)))
            expected.append((len(sequence.tokens), to_come))
        return kv.cost.future_peak(expected) <= capacity

    def _make_room(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Blocks for `count` more tokens, taken from younger sequences if need be."""
        end = sequence.computed + count
        while not self._kv.extendable(sequence.kv, end):
            youngest = self._running[-1]
            self._preempt(youngest, plan)
            if youngest is sequence:
                return False
        self._kv.extend(sequence.kv, end)
        return True

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        """Take a sequence's blocks; what nobody needs is found again, the rest computed again."""
        self._running.remove(sequence)
        self._release(sequence)
        sequence.preempted += 1
        self.preemptions += 1
        self._waiting.appendleft(sequence)
        plan.drop(sequence.id)

    def _learn(self, sequence: Sequence) -> None:
        # An answer that may have one token, such as a probe's, tells nothing.
        if sequence.generated and sequence.request.max_tokens > 1:
            self.lengths.observe(sequence.generated)

    def _remove(self, sequence: Sequence) -> None:
        """Forget a sequence, which may have given way while its last token was on its way."""
        del self._sequences[sequence.id]
        self.drafting.forget(sequence.id)
        if sequence.running:
            self._running.remove(sequence)
            self._release(sequence)
        else:
            self._waiting.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._kv.release(sequence.kv)
        sequence.running = False
        sequence.computed = 0

    def _decodes(self, sequence: Sequence) -> bool:
        return sequence.decoding and sequence.id not in self._held
