"""Puts drafts into a plan that is otherwise made, and learns what became of them.

They get what is left: nobody gives way for one, none takes a block while somebody waits for memory,
and where the gate, the limits or the memory leave no room there are fewer, or none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.wire import token_ids
from penstock.worker.core.drafts.control import DraftControl
from penstock.worker.core.gate import largest
from penstock.worker.core.plan import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Series

    from penstock.worker.core.drafts.proposer import Proposal, Proposer
    from penstock.worker.core.gate import Gate
    from penstock.worker.core.plan import Plan, Slice, StepLimits
    from penstock.worker.core.sequence import Sequence
    from penstock.worker.kv.cache import KvCache

# Tokens after which a request that gets no drafts is given one all the same: times may have been
# measured in a bad moment. Twice as many each time.
_TRIED_AGAIN, _TRIED_AT_LAST = 32, 1024


class Control(Protocol):
    """Decides how many."""

    def observe(self, rows: int, drafts: int, duration_s: float) -> None: ...

    def choose(self, survivals: Series[Series[float]], streams: int, spare: int) -> list[int]: ...

    @property
    def wants_plain(self) -> bool: ...


@dataclass(slots=True)
class Counts:
    """Of one proposer, since the start."""

    proposed: int = 0  # drafts that were verified
    accepted: int = 0


class _Candidate(NamedTuple):
    sequence: Sequence
    proposer: Proposer
    proposal: Proposal
    most: int  # drafts that there is room for


@dataclass(slots=True)
class _Request:
    """What is kept of a request between two steps."""

    pending: tuple[Proposer, Proposal] | None = None  # and nothing is known of it yet
    again_at: int = _TRIED_AGAIN  # tokens of the answer
    wait: int = _TRIED_AGAIN


class Drafting:
    """Drafts for all sequences of a scheduler."""

    def __init__(
        self,
        proposers: Series[Proposer] = (),
        most: int = 0,
        control: Control | None = None,
    ) -> None:
        """At most `most` for a sequence and step."""
        self._proposers = proposers
        self._most = most
        self._control = control or DraftControl()
        self._requests: dict[int, _Request] = {}
        self._drafted: list[Sequence] = []  # with blocks for what may be wrong
        self.paused = False  # no drafts at present
        self.counts = {proposer.name: Counts() for proposer in proposers}

    def extend(
        self,
        plan: Plan,
        sequences: Mapping[int, Sequence],
        room: Room,
    ) -> None:
        """Add drafts to the decodes of a plan."""
        if self.paused or not self._proposers:
            return
        candidates = [
            candidate
            for piece in plan.decodes
            if (candidate := self._candidate(sequences[piece.request_id], room)) is not None
        ]
        if not candidates:
            return
        chances = [each.proposal.survivals(each.most) for each in candidates]
        spare = room.spare(plan)
        chosen = self._control.choose(chances, len(plan.decodes), spare)
        chosen += self._tried_again(candidates, set(chosen), spare - len(chosen))
        chosen = chosen[: room.admitted(plan, len(chosen), self._most)]
        drafts = {
            candidates[place].sequence.id: candidates[place].proposal.tokens[:count]
            for place, count in Counter(chosen).items()
        }
        for place, piece in enumerate(plan.decodes):
            if piece.request_id in drafts:
                sequence = sequences[piece.request_id]
                self._drafted.append(sequence)
                plan.decodes[place] = room.drafted(sequence, piece, drafts[piece.request_id])

    def figures(self) -> dict[str, tuple[int, int]]:
        """By proposer: drafts that were verified, and those that were right."""
        return {name: (each.proposed, each.accepted) for name, each in self.counts.items()}

    def withdraw(self, kv: KvCache) -> None:
        """Give back the blocks that drafts reached into, right or wrong, and tokens did not."""
        for sequence in self._drafted:
            if sequence.running:
                kv.retract(sequence.kv, len(sequence.tokens))
        self._drafted.clear()

    def observe(self, plan: Plan, sampled: Mapping[int, list[int]], duration_s: float) -> None:
        """A step has run and given these tokens."""
        if not self._proposers:
            return
        if plan.decodes and not plan.chunks:
            self._control.observe(plan.tokens, plan.drafts, duration_s)
        for piece in plan.decodes:
            tokens, request = sampled.get(piece.request_id), self._requests.get(piece.request_id)
            if not tokens or request is None or request.pending is None:
                continue
            (proposer, proposal), request.pending = request.pending, None
            known = min(len(tokens), len(proposal.tokens))
            pairs = zip(proposal.tokens[:known], tokens, strict=False)
            right = next((n for n, (draft, token) in enumerate(pairs) if draft != token), known)
            proposer.learn(piece.request_id, proposal, right, known)
            counts = self.counts[proposer.name]
            counts.proposed += len(piece.drafts)
            counts.accepted += len(tokens) - 1

    def forget(self, number: int) -> None:
        """A request is gone."""
        if self._requests.pop(number, None) is not None:
            for proposer in self._proposers:
                proposer.forget(number)

    def _candidate(self, sequence: Sequence, room: Room) -> _Candidate | None:
        """The best proposal for a sequence, if there is one and room for it."""
        # What a grammar allows after a draft nobody has asked its matcher.
        if sequence.request.grammar is not None or sequence.tokens[-1] == UNKNOWN:
            return None
        request = self._requests.setdefault(sequence.id, _Request())
        request.pending = None
        # One comes by itself, and there is no place behind the last.
        wanted = min(self._most, sequence.max_tokens - len(sequence.tokens) - 1)
        if wanted < 1:
            return None
        proposals = [
            (proposer, proposal)
            for proposer in self._proposers
            if (proposal := proposer.propose(sequence.id, sequence.tokens, wanted)) is not None
        ]
        if not proposals:
            return None
        best = max(proposals, key=lambda each: sum(each[1].survivals(wanted)))
        request.pending = best
        stop = next((n for n, t in enumerate(best[1].tokens) if t in sequence.stops), wanted)
        most = min(wanted, len(best[1].tokens), stop, room.slots(sequence))
        return _Candidate(sequence, *best, most) if most > 0 else None

    def _tried_again(self, candidates: list[_Candidate], chosen: set[int], spare: int) -> list[int]:
        """Those who got none for so long that it is time for one."""
        due: list[int] = []
        if self._control.wants_plain:
            return due
        for place, candidate in enumerate(candidates):
            request, generated = self._requests[candidate.sequence.id], candidate.sequence.generated
            if place in chosen:
                request.wait = _TRIED_AGAIN
                request.again_at = generated + request.wait
            elif generated >= request.again_at and len(due) < spare:
                request.wait = min(2 * request.wait, _TRIED_AT_LAST)
                request.again_at = generated + request.wait
                due.append(place)
        return due


class Room:
    """What a step leaves for drafts."""

    def __init__(
        self,
        kv: KvCache,
        limits: StepLimits,
        gate: Gate | None,
        budget: int,
        *,
        scarce: bool,
    ) -> None:
        """`budget`: tokens of the whole step; `scarce`: somebody waits for memory."""
        self._kv = kv
        self._limits = limits
        self._gate = gate
        self._budget = budget
        self._scarce = scarce

    def slots(self, sequence: Sequence) -> int:
        """Places for drafts behind a sequence's tokens."""
        if not self._scarce:
            return self._limits.tokens
        held = min(table.count for table in sequence.kv.tables) * self._limits.block_tokens
        return max(0, held - len(sequence.tokens))

    def spare(self, plan: Plan) -> int:
        """Rows that the limits leave."""
        logit_rows = 1 + sum(piece.logit_rows for piece in plan.slices)
        return max(0, min(self._budget - plan.tokens, self._limits.logit_rows - logit_rows))

    def admitted(self, plan: Plan, count: int, longest: int) -> int:
        """How many of `count` more rows the gate admits, if a sequence gets `longest` at most."""
        if self._gate is None or not count:
            return count
        gate, shape = self._gate, plan.shape
        return largest(
            0,
            count,
            lambda rows: gate.fits(shape.plus(rows, shape.context + longest, rows, 0)),
        )

    def drafted(self, sequence: Sequence, piece: Slice, drafts: list[int]) -> Slice:
        """A slice with as many of the drafts as there are blocks for."""
        while drafts and not self._kv.extendable(sequence.kv, piece.end + len(drafts)):
            drafts = drafts[:-1]
        if not drafts:
            return piece
        try:
            self._kv.extend(sequence.kv, piece.end + len(drafts))
        except MemoryError:  # it is not worth a smaller step; part of it is given back later
            return piece
        return piece.with_drafts(token_ids(drafts), sequence.kv.arrays)
