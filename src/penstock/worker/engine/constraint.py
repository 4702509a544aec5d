"""The token constraint of one answer: the budget of its reasoning, then its grammar.

thinking ──end──▶ answer                    a grammar holds in the answer only
    └─ budget spent: the end is the only token allowed
"""

from __future__ import annotations

from copy import copy
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from penstock.wire import FrameReader

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence as Series

    from numpy.typing import NDArray

    from penstock.grammars.messages import Mask
    from penstock.wire import Thinking, TokenIds
    from penstock.worker.engine.requests import RequestState

    Bits = NDArray[np.int32]

# Nobody waits for a mask whose predecessor took so long: its sequence sits out meanwhile.
_SLOW_MASK_S = 0.01


class Matcher:
    """The process of one grammar, as it is reached from here."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.sock: socket.socket | None = None  # None: it is waited for
        self.asked_at = 0.0
        self.users: dict[int, Constraint] = {}
        self.frames = FrameReader()
        self.unsent = bytearray()

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
        self.sock = None
        self.frames = FrameReader()
        self.unsent.clear()


class _Phase(Enum):
    UNDECIDED = 0  # the first token says whether the model thinks
    THINKING = 1
    ANSWER = 2


class Constraint:
    """What one answer may go on with, as far as its tokens are known."""

    def __init__(self, stop_token_ids: TokenIds, thinking: Thinking | None) -> None:
        self.matcher: Matcher | None = None  # of its grammar, if it has one
        self.failure = ""  # why it cannot be kept any further
        self.fed = 0  # tokens of the answer that the matcher has
        self.asked_at: int | None = None  # the place whose mask the matcher was asked for
        self.asked_number = 0  # in the order of asking
        self.answer: Mask | None = None
        self.slow = False
        self.deaths = 0
        self._stops = stop_token_ids
        self._thinking = thinking
        self._phase = _Phase.ANSWER
        if thinking is not None:
            self._phase = _Phase.THINKING if thinking.open else _Phase.UNDECIDED
        self._seen = 0  # generated tokens that are taken in
        self._before = 0  # of those, before the answer proper
        self._thought = 0  # tokens of reasoning
        self._ended = 0  # tokens of its end that have come

    def branch(self) -> Constraint:
        """Another, for a branch of its sequence. No matcher was asked what it says there."""
        assert self.matcher is None, "an answer with a grammar has no drafts"
        return copy(self)

    def take(self, sequence: RequestState) -> None:
        """Take in the tokens that have come."""
        for token in sequence.answer_from(self._seen):
            self._take(token)
        self._seen = sequence.generated
        if self.answer is not None and self.answer.at != self.answer_tokens(sequence):
            self.answer = None

    def answer_tokens(self, sequence: RequestState) -> int:
        """Tokens of the answer proper."""
        return sequence.generated - self._before

    @property
    def pending(self) -> bool:
        """The matcher's word is needed, and not here."""
        if self.matcher is None or self._phase is _Phase.THINKING:
            return False
        return self.answer is None

    def answered(self, answer: Mask, size: int) -> None:
        """The matcher's word on the place that it was asked for."""
        if answer.at != self.asked_at:
            return
        self.answer, self.deaths = answer, 0
        self.slow = answer.cpu_s > _SLOW_MASK_S
        if answer.error:
            self.failure = answer.error
        elif len(answer.bits) != size:
            self.failure = f"a mask has {len(answer.bits)} bytes instead of {size}"

    def forget(self) -> None:
        """The matcher is gone; what it has said still holds."""
        self.fed = 0
        self.asked_at = None

    def fill(self, row: Bits) -> bool:
        """Write the mask of the next token; False when every token is allowed."""
        if self._phase is _Phase.THINKING:
            return self._fill_thinking(row)
        if self.answer is None:
            return False
        row[:] = np.frombuffer(self.answer.bits, dtype=np.int32)
        if self.answer.accepting:
            _allow(row, self._stops)
        if self._phase is _Phase.UNDECIDED and self._thinking is not None:
            _allow(row, [] if self._thinking.start is None else [self._thinking.start])
        return True

    def _fill_thinking(self, row: Bits) -> bool:
        thinking = self._thinking
        assert thinking is not None
        if thinking.budget is not None and self._thought >= thinking.budget:
            row[:] = 0
            _allow(row, [thinking.end[self._ended]])
            return True
        if self.matcher is None:
            return False
        # An answer that ended here would not have the form it must have.
        row[:] = -1
        _forbid(row, self._stops)
        return True

    def _take(self, token: int) -> None:
        if self._phase is _Phase.UNDECIDED:
            assert self._thinking is not None
            thinks = token == self._thinking.start
            self._phase = _Phase.THINKING if thinks else _Phase.ANSWER
            if thinks:
                self._before += 1
                return
        if self._phase is _Phase.THINKING:
            self._before += 1
            self._take_thought(token)

    def _take_thought(self, token: int) -> None:
        assert self._thinking is not None
        end = self._thinking.end
        spent = self._thinking.budget is not None and self._thought >= self._thinking.budget
        self._thought += not spent
        if token == end[self._ended]:
            self._ended += 1
        else:
            self._ended = int(token == end[0])
        if self._ended == len(end):
            self._phase = _Phase.ANSWER


def _allow(row: Bits, tokens: Series[int]) -> None:
    places, bits = _bits(tokens)
    np.bitwise_or.at(row, places, bits)


def _forbid(row: Bits, tokens: Series[int]) -> None:
    places, bits = _bits(tokens)
    np.bitwise_and.at(row, places, ~bits)


def _bits(tokens: Series[int]) -> tuple[NDArray[np.int64], Bits]:
    """The words of a mask that have some tokens, and their bits in these."""
    ids = np.asarray(tokens, np.int64)
    return ids >> 5, (np.uint32(1) << (ids & 31).astype(np.uint32)).view(np.int32)
