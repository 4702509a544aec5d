"""Bytes of requests in the server itself: bodies, decoded fields, texts and token lists.

They are booked under `requests` in `ram` before they are read or made. A floor is always booked,
so that KV can never take all of the memory that requests need; beyond it the pool grows as far as
the books allow. Who finds no room waits in order of arrival and does not read on meanwhile, which
the client sees as a slow connection, until its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.errors import BodyTooLarge, Overloaded
from penstock.memory.ledger import OutOfBudget, Purpose

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from penstock.memory.ledger import Ledger

# Bytes of the process per byte of body, booked before it is read: for the body, its texts and the
# prompt made of them, or for token ids (4.8: each is an object and a place in a list).
BODY_FACTOR = 5
# A single character that is not Latin makes every other of its text take four bytes, in the
# message and in the prompt.
_WIDE_FACTOR = 10
# And for each value, string (twice), list and object of it, however short; an object may be a
# message or a call, which is made once more for the chat template.
_MARKS = {b",": 24, b'"': 20, b"[": 80, b"{": 320}
# One more id in a list: 8 bytes for its place, 32 for the number (28 rounded up).
TOKEN_BYTES = 40

# One token of an answer that is kept until it is whole, and one log-probability of it: 125 bytes as
# it came, 366 as it is rendered, 85 as it is sent.
ANSWER_TOKEN_BYTES = 700
LOGPROB_BYTES = 580

_MOST_SHARE = 4  # requests never get more of the limit than a quarter
_FLOOR_SHARE = 96  # of the limit; 21 MiB of 2 GiB
_FLOOR_LEAST = 8 << 20
_FLOOR_MOST = 256 << 20


def floor_bytes(limit_bytes: int) -> int:
    """What is always kept for requests."""
    return max(_FLOOR_LEAST, min(limit_bytes // _FLOOR_SHARE, _FLOOR_MOST))


def decoded_bytes(body: bytes) -> int:
    """What a JSON body takes at most while it is made into a prompt, itself included.

    Without a look at what is text and what is not: marks within a text are booked for nothing.
    """
    wide = not body.isascii() or b"\\u" in body
    size = len(body) * (_WIDE_FACTOR if wide else BODY_FACTOR)
    return size + sum(each * body.count(mark) for mark, each in _MARKS.items())


@dataclass(slots=True)
class _Waiter:
    size: int
    held: int  # by the same request
    turn: asyncio.Future[None] = field(default_factory=asyncio.Future)


class RequestPool:
    """The one booking that all requests share; used on the event loop only."""

    def __init__(self, ledger: Ledger, floor: int, most_bodies: int, patience_s: float) -> None:
        limit = ledger.snapshot()["ram"].limit_bytes
        self._most = min(most_bodies * BODY_FACTOR, limit // _MOST_SHARE)
        self._floor = floor = min(floor, self._most)
        # Told how much could not be had, whenever someone begins to wait.
        self.on_starved: Callable[[int], None] = lambda _: None
        self._patience_s = patience_s
        self._used = 0
        self._waiters: deque[_Waiter] = deque()
        self._booking = ledger.reserve("requests", {("ram", Purpose.REQUESTS): floor})

    @property
    def used_bytes(self) -> int:
        """Held by requests now; the booking is this or the floor, whichever is more."""
        return self._used

    @property
    def most_bytes(self) -> int:
        """More than this is never given, to one request or all."""
        return self._most

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiters)

    def share(self) -> Share:
        """One request's part of the pool, empty; give it back with `release` or a `with` block."""
        return Share(self)

    def retry(self) -> None:
        """Room may have come back elsewhere: let those in front of the line try again."""
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.turn.done():
                if not self._try(waiter.size):
                    return
                waiter.turn.set_result(None)
            self._waiters.popleft()

    async def take(self, size: int, held: int = 0) -> None:
        """Book `size` more bytes for a request that holds some, in turn.

        `BodyTooLarge` if it can never have them, `Overloaded` after the deadline, or at once if
        all that requests may have is held by such as wait for more: nobody would give any back.
        """
        if held + size > self._most:
            raise self._too_large(held + size)
        if not self._waiters and self._try(size):
            return
        if self._used + size > self._most and held + self._held_by_waiters() >= self._used:
            raise self._overloaded(size)
        waiter = _Waiter(size, held)
        self._waiters.append(waiter)
        self.on_starved(self._used + sum(w.size for w in self._waiters) - self._booking.total())
        try:
            async with asyncio.timeout(self._patience_s):
                await waiter.turn
        except TimeoutError:
            if not _had(waiter):
                raise self._overloaded(size) from None
        except asyncio.CancelledError:
            if _had(waiter):
                self.give(size)
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def take_now(self, size: int) -> None:
        """Book `size` more bytes of something that has begun and must end: never waits.

        Where the books have no room, what is used is more than what is booked until the readings
        have it; no new request comes in meanwhile.
        """
        self._used += size
        if self._used > self._booking.total():
            with contextlib.suppress(OutOfBudget):
                self._booking.resize({("ram", Purpose.REQUESTS): self._used})

    def give(self, size: int) -> None:
        """Return what `take` booked."""
        self._used -= size
        assert self._used >= 0
        size = max(self._used, self._floor)
        if size < self._booking.total():
            self._booking.resize({("ram", Purpose.REQUESTS): size})
        self.retry()

    def _held_by_waiters(self) -> int:
        return sum(waiter.held for waiter in self._waiters)

    def _try(self, size: int) -> bool:
        used = self._used + size
        if used > self._most:
            return False
        if used > self._booking.total():
            try:
                self._booking.resize({("ram", Purpose.REQUESTS): used})
            except OutOfBudget:
                return False
        self._used = used
        return True

    def _too_large(self, size: int) -> BodyTooLarge:
        return BodyTooLarge(
            f"This request would take {size} bytes in the server, and all requests together may "
            f"have {self._most} (server.max_bodies, and a quarter of memory.limit).",
            numbers={
                "reason": "memory",
                "domain": "ram",
                "needed_bytes": size,
                "limit_bytes": self._most,
            },
        )

    def _overloaded(self, size: int) -> Overloaded:
        return Overloaded(
            f"There is no memory for the {size} bytes that this request takes in the server: "
            f"{self._used} bytes of requests are held, and at most {self._most} may be "
            "(server.max_bodies and memory.limit); try again shortly.",
            retry_after_s=1,
            numbers={
                "reason": "memory",
                "domain": "ram",
                "needed_bytes": size,
                "limit_bytes": self._booking.total() - self._used,
            },
        )


def _had(waiter: _Waiter) -> bool:
    """Whether its turn came in the same moment."""
    return waiter.turn.done() and not waiter.turn.cancelled()


class Share:
    """What one request holds of the pool."""

    def __init__(self, pool: RequestPool, beside: Share | None = None) -> None:
        self._pool = pool
        self._beside = beside
        self.size = 0

    def apart(self) -> Share:
        """A part of the same request that may outlive it."""
        return Share(self._pool, beside=self)

    @property
    def held(self) -> int:
        """By the whole request, as far as is known here."""
        return self.size + (self._beside.held if self._beside is not None else 0)

    async def grow(self, size: int) -> None:
        """Hold so much more; waits for it."""
        await self._pool.take(size, self.held)
        self.size += size

    def grow_now(self, size: int) -> None:
        """Hold so much more at once."""
        self._pool.take_now(size)
        self.size += size

    def shrink(self, size: int) -> None:
        """Hold so much less."""
        size = min(size, self.size)
        self.size -= size
        self._pool.give(size)

    def release(self) -> None:
        """Give everything back."""
        self.shrink(self.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
