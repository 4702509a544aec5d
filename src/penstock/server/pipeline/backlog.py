"""Answer pieces that a slow client has not read yet: merged, booked and bounded.

Pieces are handed on one by one as long as the client keeps up. Behind that they are merged, so
that an answer that nobody reads comes to a hundred bytes a token, not to an object a token.
Every byte of it is booked for the request. All streams together have a bound: beyond it the stream
that is furthest behind is ended, of the client whose streams are. Knows pieces, not how they are
rendered or sent.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.errors import Overloaded
from penstock.memory.clients.requests import LOGPROB_BYTES
from penstock.text.parts import merged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.memory.clients.requests import RequestMemory
    from penstock.server.pipeline.pieces import Piece

# A piece of one token, measured: the object with its lists, then its text, ids and offsets alone.
PIECE_BYTES = 700
MERGED_TOKEN_BYTES = 128

BOOKED_BYTES = 8 << 10  # at a time: a client that keeps up changes no books
_KEPT_APART = 64  # pieces; a client that lags behind by more is not kept up with token by token
_MERGED_TOKENS = 256  # in one piece: merging copies its text
_MERGED_LOGPROBS = 8
_TAKEN_BYTES = 64 << 10  # what is on its way cannot be dropped any more
_SHARE = 4  # streams that are not read get no more than a quarter of what requests may have


class Backlogs:
    """Of all streams of one server."""

    def __init__(self, max_request_bytes: int) -> None:
        self.max_bytes = max_request_bytes // _SHARE
        self.used_bytes = 0
        self._all: dict[Backlog, None] = {}

    @contextmanager
    def open(self, memory: RequestMemory) -> Iterator[Backlog]:
        """What waits for the client of one request."""
        backlog = Backlog(memory, self)
        self._all[backlog] = None
        try:
            yield backlog
        finally:
            del self._all[backlog]
            backlog.drop()

    def changed(self, size: int) -> None:
        """So much more waits for clients, which may be too much."""
        self.used_bytes += size
        while self.used_bytes > self.max_bytes:
            held: Counter[str] = Counter()
            for backlog in self._all:
                held[backlog.client] += backlog.held_bytes
            worst = max(self._all, key=lambda one: (held[one.client], one.held_bytes))
            worst.give_up(
                f"The client is too far behind this stream: {worst.held_bytes} bytes of it waited "
                f"here, and all streams together may have {self.max_bytes} (memory.limit, "
                "server.max_bodies). Read it faster, or ask for fewer log-probabilities."
            )


class Backlog:
    """A sink for pieces, read by whoever sends them."""

    keeps = False

    def __init__(self, memory: RequestMemory, every: Backlogs) -> None:
        self._memory = memory
        self._every = every
        self._pieces: list[Piece] = []
        self._latest: dict[int, Piece] = {}  # by choice, those that can still be added to
        self.held_bytes = 0  # of what is waiting
        self._sending = 0  # and of what was taken and is on its way
        self._booked = 0  # for both
        self._used = False
        self._error: Overloaded | None = None
        self._ended = False
        self._arrived = asyncio.Event()
        self._wait_ends_at = math.inf
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def client(self) -> str:
        """Who does not read."""
        return self._memory.client

    def put(self, piece: Piece) -> None:
        """Take the next piece of a choice."""
        if self._error is not None:
            raise self._error
        self._used = True
        size = _bytes(piece)
        latest = self._latest.get(piece.choice)
        if latest is not None and len(self._pieces) >= _KEPT_APART and _may_join(latest, piece):
            _join(latest, piece)
            size -= PIECE_BYTES
        else:
            self._pieces.append(piece)
            self._latest[piece.choice] = piece
        self._hold(size)
        self._book()
        self._arrived.set()

    def give_up(self, why: str) -> None:
        """The client is too slow: it gets no more than what is on its way to it, and the reason."""
        self._error = Overloaded(why, retry_after_s=1)
        self.drop()
        self._arrived.set()

    def drop(self) -> None:
        """Nothing of what is waiting is wanted."""
        self._pieces.clear()
        self._latest.clear()
        self._hold(-self.held_bytes)
        self._book()

    def _hold(self, size: int) -> None:
        self.held_bytes += size
        self._every.changed(size)

    def _book(self) -> None:
        spare = self._booked - self.held_bytes - self._sending
        if spare < 0:
            change = max(-spare, BOOKED_BYTES)
            self._memory.grow_now(change)
            self._booked += change
            return
        kept = 0 if self.ended or self._error else BOOKED_BYTES
        if spare > 2 * kept:
            self._memory.shrink(spare - kept)
            self._booked -= spare - kept

    def restart(self) -> bool:
        """Only while nothing was put: the client may have seen it."""
        return not self._used

    def end(self) -> None:
        """Nothing more will come."""
        self._ended = True
        self._arrived.set()
        if self._alarm is not None:
            self._alarm.cancel()

    @property
    def ended(self) -> bool:
        """Whether everything there will ever be was taken."""
        return self._ended and not self._pieces

    async def take(self, patience_s: float) -> list[Piece]:
        """Some of what is there, as soon as there is something; nothing after that long, or at the
        end. `Overloaded` if it has become too much."""
        if not (self._pieces or self._ended or self._error):
            self._arrived.clear()
            self._wake_after(patience_s)
            await self._arrived.wait()
            self._wait_ends_at = math.inf
        if self._error is not None:
            raise self._error
        size, count = self.held_bytes, len(self._pieces)
        if size > _TAKEN_BYTES:
            size, count = 0, 0
            while count < len(self._pieces) and size < _TAKEN_BYTES:
                size += _bytes(self._pieces[count])
                count += 1
        pieces, self._pieces = self._pieces[:count], self._pieces[count:]
        self._latest = {piece.choice: piece for piece in self._pieces}
        self._sending += size
        self._hold(-size)
        return pieces

    def sent(self) -> None:
        """What was taken is with the client."""
        self._sending = 0
        self._book()

    def _wake_after(self, patience_s: float) -> None:
        # One timer for many waits: tokens come more often than timers are worth making.
        loop = asyncio.get_running_loop()
        self._wait_ends_at = loop.time() + patience_s
        if self._alarm is None:
            self._alarm = loop.call_at(self._wait_ends_at, self._wake)

    def _wake(self) -> None:
        self._alarm = None
        loop = asyncio.get_running_loop()
        if loop.time() >= self._wait_ends_at:
            self._arrived.set()
        elif self._wait_ends_at < math.inf:
            self._alarm = loop.call_at(self._wait_ends_at, self._wake)


def _bytes(piece: Piece) -> int:
    size = PIECE_BYTES + MERGED_TOKEN_BYTES * len(piece.tokens)
    if piece.logprobs:
        size += LOGPROB_BYTES * sum(1 + len(one.top) for one in piece.logprobs)
    return size


def _may_join(latest: Piece, piece: Piece) -> bool:
    return (
        latest.finish is None
        and piece.prompt_logprobs is None
        and len(latest.tokens) < _MERGED_TOKENS
        and len(latest.logprobs) < _MERGED_LOGPROBS
    )


def _join(latest: Piece, piece: Piece) -> None:
    latest.text += piece.text
    latest.tokens += piece.tokens
    latest.offsets += piece.offsets
    latest.logprobs += piece.logprobs
    latest.parts = merged([*latest.parts, *piece.parts])
    latest.finish, latest.stop_string = piece.finish, piece.stop_string
