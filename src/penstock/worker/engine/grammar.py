"""Token masks: of grammars, which matcher processes compute, and of reasoning budgets.

A mask is one bit per token of the vocabulary. It follows from the tokens that a sequence has, so
nothing of it must be undone when a step fails, and a matcher that has died is replaced by another
that is given the same tokens. Grammars are followed by processes of their own: they are asked for
masks before the forward and answer while it runs (`penstock.grammars`). Who has no answer in time
sits the step out. Knows no logits: the sampler applies masks.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from penstock.errors import BadRequest
from penstock.grammars.messages import (
    PACKET_BYTES,
    Ask,
    Drop,
    Evicted,
    Open,
    Opened,
    Refused,
    ToMatcher,
    from_host_to_worker,
    mask_answer,
    packed,
)
from penstock.wire import frame
from penstock.worker.engine.constraint import Constraint, Matcher

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from penstock.wire import Submit
    from penstock.worker.engine.constraint import Bits
    from penstock.worker.engine.requests import RequestState

# How long a step waits for masks once its forward is done.
MASK_WAIT_S = 0.01
_ASK_AGAIN_S = 2.0  # for a matcher: the host may have been replaced
_DEATHS = 2  # of matchers at work on a request, which then ends with an error


@dataclass(slots=True)
class Masks:
    """The masks of one step: `bits[i]` is for row `rows[i]` of those that sample."""

    rows: list[int]
    bits: Bits  # [len(rows), words]
    late: set[int] = field(default_factory=set)  # rows that cannot be sampled in this step
    failed: dict[int, str] = field(default_factory=dict)  # requests that cannot go on, and why


class Grammars:
    """All constraints of one model; used on the device thread only."""

    def __init__(self, vocabulary: int, host: socket.socket | None = None) -> None:
        """`host` leads to the model's grammar host; without it only reasoning is bounded."""
        self._words = -(-(vocabulary + 1) // 32)
        self._host = host
        if host is not None:
            host.setblocking(False)
        self._constraints: dict[int, Constraint] = {}
        self._matchers: dict[bytes, Matcher] = {}
        self._held: dict[int, RequestState] = {}  # sit out until their mask is there
        self._wanted: list[tuple[int, RequestState, Constraint]] = []  # of the step in hand
        self._asks = 0

    def add(self, request: Submit) -> None:
        """Take a request; refuses one whose form cannot be kept."""
        if request.grammar is None and request.thinking is None:
            return
        constraint = Constraint(request.stop_token_ids, request.thinking)
        if request.grammar is not None:
            if self._host is None:
                refuse_unconstrained()
            matcher = self._matchers.get(request.grammar)
            if matcher is None:
                matcher = self._matchers[request.grammar] = Matcher(request.grammar)
                self._open(matcher)
            matcher.users[request.id] = constraint
            constraint.matcher = matcher
        self._constraints[request.id] = constraint

    def remove(self, request_id: int) -> None:
        """Forget a request."""
        constraint = self._constraints.pop(request_id, None)
        self._held.pop(request_id, None)
        if constraint is None or constraint.matcher is None:
            return
        matcher = constraint.matcher
        del matcher.users[request_id]
        if not matcher.users:
            matcher.close()
            del self._matchers[matcher.key]
        elif matcher.sock is not None:
            self._send(matcher, Drop(request_id))

    def ready(self, request_id: int) -> bool:
        """Whether its masks can be asked for, or will never be."""
        constraint = self._constraints.get(request_id)
        if constraint is None or constraint.matcher is None:
            return True
        return constraint.matcher.sock is not None or bool(constraint.failure)

    def failure(self, request_id: int) -> str:
        """Why it cannot go on; "" if it can."""
        constraint = self._constraints.get(request_id)
        return "" if constraint is None else constraint.failure

    @property
    def held(self) -> Collection[int]:
        """Requests that sit out until their mask is there."""
        return self._held.keys()

    @property
    def waits(self) -> bool:
        """Something is to come from another process."""
        return bool(self._held) or any(m.sock is None for m in self._matchers.values())

    def poll(self, wait_s: float = 0.0) -> None:
        """Take in what has come, or comes first within so long."""
        if self._host is None or not self._matchers:
            return
        self._open_again()
        fds: dict[int, Matcher | None] = {self._host.fileno(): None}
        poller = select.poll()
        poller.register(self._host, select.POLLIN)
        for matcher in self._matchers.values():
            if matcher.sock is not None:
                fds[matcher.sock.fileno()] = matcher
                unsent = select.POLLOUT if matcher.unsent else 0
                poller.register(matcher.sock, select.POLLIN | unsent)
        ready = dict(poller.poll(int(wait_s * 1000)))
        if self._host.fileno() in ready:  # first: it says which ends are no fault
            self._hear_host()
        for fd, what in ready.items():
            known = fds[fd]
            if known is None or known.sock is None or known.sock.fileno() != fd:
                continue
            if what & select.POLLOUT:
                self._flush(known)
            if what & ~select.POLLOUT:
                self._hear(known)
        self._release()

    def begin(self, sequences: list[RequestState]) -> bool:
        """Ask for the masks of these, which are to sample in this step; False: all are free."""
        self._wanted = []
        for row, sequence in enumerate(sequences):
            constraint = self._constraints.get(sequence.id)
            if constraint is None:
                continue
            if sequence.is_branch:
                constraint = constraint.branch()
            self._wanted.append((row, sequence, constraint))
            constraint.take(sequence)
            self._ask(sequence, constraint)
        return bool(self._wanted)

    def collect(self, wait_s: float = MASK_WAIT_S) -> Masks:
        """The masks of the step that was begun; waits a little for those that are usually quick."""
        deadline = time.monotonic() + wait_s
        self.poll()
        while any(c.pending and not c.slow for _, _, c in self._wanted):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self.poll(max(left, 0.001))
        wanted, self._wanted = self._wanted, []
        masks = Masks([], np.empty((len(wanted), self._words), dtype=np.int32))
        for row, sequence, constraint in wanted:
            if constraint.failure:
                masks.failed[sequence.id] = constraint.failure
                masks.late.add(row)
            elif constraint.pending:
                masks.late.add(row)
                self._held[sequence.id] = sequence
            elif constraint.fill(masks.bits[len(masks.rows)]):
                masks.rows.append(row)
        masks.bits = masks.bits[: len(masks.rows)]
        return masks

    # --- matchers ------------------------------------------------------------------------------

    def _open(self, matcher: Matcher) -> None:
        assert self._host is not None
        matcher.asked_at = time.monotonic()
        with contextlib.suppress(OSError):  # tried again after a while
            self._host.send(packed(Open(matcher.key)))

    def _open_again(self) -> None:
        now = time.monotonic()
        for matcher in self._matchers.values():
            if matcher.sock is None and now - matcher.asked_at > _ASK_AGAIN_S:
                self._open(matcher)

    def _ask(self, sequence: RequestState, constraint: Constraint) -> None:
        matcher = constraint.matcher
        if matcher is None or matcher.sock is None or not constraint.pending:
            return
        at = constraint.answer_tokens(sequence)
        if constraint.asked_at == at:
            return
        fresh = sequence.answer[len(sequence.answer) - at + constraint.fed :]
        constraint.asked_at = constraint.fed = at
        self._asks += 1
        constraint.asked_number = self._asks
        self._send(matcher, Ask(sequence.id, at, list(fresh)))

    def _send(self, matcher: Matcher, message: ToMatcher) -> None:
        matcher.unsent += frame(message)
        self._flush(matcher)

    def _flush(self, matcher: Matcher) -> None:
        assert matcher.sock is not None
        try:
            sent = matcher.sock.send(matcher.unsent)
        except BlockingIOError:
            return
        except OSError:
            return  # its end is read
        del matcher.unsent[:sent]

    def _hear_host(self) -> None:
        assert self._host is not None
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._host, PACKET_BYTES, 1)
            except OSError:
                return
            if not data:
                return
            message = from_host_to_worker.decode(data)
            matcher = self._matchers.get(message.key)
            if isinstance(message, Opened):
                sock = socket.socket(fileno=fds[0])
                if matcher is None or matcher.sock is not None:
                    sock.close()  # asked for twice, or by nobody who is still here
                else:
                    sock.setblocking(False)
                    matcher.sock = sock
                    self._ask_all(matcher)
            elif matcher is not None and isinstance(message, Refused):
                for constraint in matcher.users.values():
                    constraint.failure = message.reason
            elif matcher is not None and isinstance(message, Evicted):
                self._lost(matcher, fault=False)

    def _hear(self, matcher: Matcher) -> None:
        assert matcher.sock is not None
        try:
            data = matcher.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost(matcher, fault=True)
            return
        for body in matcher.frames.feed(data):
            answer = mask_answer.decode(body)
            constraint = matcher.users.get(answer.id)
            if constraint is not None:
                constraint.answered(answer, 4 * self._words)

    def _lost(self, matcher: Matcher, *, fault: bool) -> None:
        """A matcher has ended: have another. Whom it was at work for may be why."""
        matcher.close()
        asked = [c for c in matcher.users.values() if c.asked_at is not None and c.answer is None]
        if fault and asked:
            first = min(asked, key=lambda constraint: constraint.asked_number)
            first.deaths += 1
            if first.deaths >= _DEATHS:
                first.failure = (
                    f"the process that follows its grammar ended {first.deaths} times at the same "
                    "place, for want of processor time (server.grammar_timeout_s) or memory "
                    "(memory.grammars)."
                )
        for constraint in matcher.users.values():
            constraint.forget()
        self._open(matcher)

    def _ask_all(self, matcher: Matcher) -> None:
        """A new matcher is given all tokens of those who wait for it."""
        waiting: Iterable[RequestState] = [*self._held.values(), *(s for _, s, _ in self._wanted)]
        for sequence in {sequence.id: sequence for sequence in waiting}.values():
            constraint = self._constraints.get(sequence.id)
            if constraint is not None and constraint.matcher is matcher:
                self._ask(sequence, constraint)

    def _release(self) -> None:
        """Who has its mask takes part in steps again."""
        for number in list(self._held):
            constraint = self._constraints[number]
            if constraint.failure or not constraint.pending:
                del self._held[number]


def refuse_unconstrained() -> NoReturn:
    """Nobody can be held to a form where there is no grammar host."""
    raise BadRequest(
        "Answers of this model cannot be constrained: it has no tokenizer.json, or the package "
        "llguidance is not installed."
    )
