"""Bytes of requests in the server itself: bodies, decoded fields, texts and token lists.

They are booked under `requests` in `ram` before they are read or made. A floor is always booked,
so that KV can never take all of the memory that requests need; beyond it the pool grows as far as
the books allow. Who finds no room waits and does not read on meanwhile, which the client sees as a
slow connection, until its deadline.

Whoever fits is served, the client that holds least first, so a large request does not keep small
ones waiting. When as much as the whole pool has passed a waiter it is overdue: nothing new is let
past it then. A part of the pool is kept for small requests, whoever waits, and a client that has
requests begins no other where less than a quarter would be left. Whoever has waited for a while has
requests end that keep memory for slow clients (`ClientWaits`).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.errors import BodyTooLarge, Overloaded
from penstock.memory.bookings import GrowingReservation
from penstock.memory.clients.json_weight import BODY_FACTOR
from penstock.memory.clients.waits import PATIENCE_S, ClientWait, ClientWaits
from penstock.memory.domains import RAM

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from typing import Self

    from penstock.memory.clients.waits import Limits
    from penstock.memory.ledger import Ledger

# One more id in a list: 8 bytes for its place, 32 for the number (28 rounded up).
TOKEN_BYTES = 40

# One token of an answer that is kept until it is whole, and one log-probability of it: 125 bytes as
# it came, 366 as it is rendered, 85 as it is sent.
ANSWER_TOKEN_BYTES = 700
LOGPROB_BYTES = 580

_MAX_SHARE = 4  # requests never get more of the limit than a quarter
_FLOOR_SHARE = 96  # of the limit; 21 MiB of 2 GiB
_KEPT_SHARE = 4  # of the floor, beside it, for small requests
_SMALL_SHARE = 4  # of that: what a small request has at most
_OTHERS_SHARE = 4  # of the pool: left to others by a client that has requests already
_FLOOR_MIN = 8 << 20
_FLOOR_MAX = 256 << 20


def floor_bytes(limit_bytes: int) -> int:
    """What is always kept for requests."""
    return max(_FLOOR_MIN, min(limit_bytes // _FLOOR_SHARE, _FLOOR_MAX))


@dataclass(slots=True, eq=False)
class _Waiter:
    memory: RequestMemory
    size: int
    number: int  # in order of arrival
    passed_bytes: int = 0  # given to later ones meanwhile
    since: float = field(default_factory=time.monotonic)
    turn: asyncio.Future[None] = field(default_factory=asyncio.Future)


class RequestPool:
    """The bookings that all requests share; used on the event loop only."""

    def __init__(
        self,
        ledger: Ledger,
        floor: int,
        max_bodies: int,
        patience_s: float,
        owner: str = "requests",
    ) -> None:
        limit = ledger.snapshot()[RAM].limit_bytes
        most = min(max_bodies * BODY_FACTOR, limit // _MAX_SHARE)
        floor = min(floor, most)
        kept = floor // _KEPT_SHARE
        # Told how much could not be had, whenever someone begins to wait.
        self.on_starved: Callable[[int], None] = lambda _: None
        self.client_waits = ClientWaits()
        self._patience_s = patience_s
        self._main = GrowingReservation(ledger, owner, floor, most)
        self._kept = GrowingReservation(ledger, f"small {owner}", kept, kept)
        self._small = kept // _SMALL_SHARE
        self._held: Counter[str] = Counter()  # of the main part, by client
        self._waiters: list[_Waiter] = []
        self._numbers = itertools.count()
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def used_bytes(self) -> int:
        """Held by requests now."""
        return self._main.used_bytes + self._kept.used_bytes

    @property
    def max_bytes(self) -> int:
        """More than this one request is never given."""
        return self._main.max_bytes

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiters)

    def request_memory(self, client: str | None = None) -> RequestMemory:
        """One request's part of the pool, empty; give it back with `release` or a `with` block.
        Requests of one client count together; without a name it is a client of its own."""
        return RequestMemory(self, f"request {next(self._numbers)}" if client is None else client)

    def retry(self) -> None:
        """Room may have come back elsewhere: let those who wait try again."""
        waiting = [waiter for waiter in self._waiters if not waiter.turn.done()]
        if not waiting:
            return
        # There may be thousands, and most of the time there is room for none of them.
        smallest = min(waiter.size for waiter in waiting)
        if self._main.has_room(smallest) or self._kept.has_room(smallest):
            overdue = self._overdue()
            for waiter in sorted(waiting, key=lambda w: (self._held[w.memory.client], w.number)):
                if self._serve(waiter, overdue):
                    waiter.turn.set_result(None)
                    overdue = self._overdue()
        while (stuck := self._stuck()) is not None:
            stuck.turn.set_exception(self._overloaded(stuck.size))

    async def take(self, memory: RequestMemory, size: int) -> None:
        """Book `size` more bytes for a request, when they are to be had.

        `BodyTooLarge` if it can never have them, `Overloaded` after the deadline, or immediately
        if the pool is held only by requests that themselves wait.
        """
        if memory.held + size > self.max_bytes:
            raise self._too_large(memory.held + size)
        waiter = _Waiter(memory, size, next(self._numbers))
        if self._serve(waiter, self._overdue()):
            return
        self._waiters.append(waiter)
        try:
            while (stuck := self._stuck()) is not None:
                stuck.turn.set_exception(self._overloaded(stuck.size))
            wanted = sum(w.size for w in self._waiters)
            self.on_starved(self._main.used_bytes + wanted - self._main.booked_bytes)
            self._set_alarm()
            async with asyncio.timeout(self._patience_s):
                await waiter.turn
        except TimeoutError:
            if not _had(waiter):
                raise self._overloaded(size) from None
        except asyncio.CancelledError:
            if _had(waiter):
                self.give(memory, size)
            raise
        finally:
            self._waiters.remove(waiter)
            self.retry()  # it may have been what others waited behind

    def take_now(self, memory: RequestMemory, size: int) -> None:
        """Book `size` more bytes of something that has begun and must end: never waits.

        Where the books have no room, what is used is more than what is booked until the readings
        have it; no new request comes in meanwhile.
        """
        self._main.take_now(size)
        self._count(memory, size)

    def give(self, memory: RequestMemory, size: int) -> None:
        """Return what was booked for a request."""
        kept = min(size, memory.kept)
        memory.kept -= kept
        memory.size -= size
        self._kept.give(kept)
        self._main.give(size - kept)
        self._held[memory.client] -= size - kept
        if not self._held[memory.client]:
            del self._held[memory.client]
        self.retry()

    def check(self) -> None:
        """The sums agree, nobody waits for nothing, and not everybody waits for each other."""
        assert self._main.used_bytes == sum(self._held.values())
        assert all(size > 0 for size in self._held.values())
        assert self._kept.used_bytes <= self._kept.max_bytes
        assert not any(w.turn.done() for w in self._waiters if _had(w) and w.memory.held == 0)
        assert self._stuck() is None

    def _count(self, memory: RequestMemory, size: int) -> None:
        memory.size += size
        if size:
            self._held[memory.client] += size

    def _serve(self, waiter: _Waiter, overdue: float) -> bool:
        memory, size = waiter.memory, waiter.size
        if not self._must_wait(waiter, overdue) and self._main.take(size):
            self._count(memory, size)
            for other in self._waiters:
                if other.number < waiter.number:
                    other.passed_bytes += size
            return True
        if memory.held + size <= self._small and self._kept.take(size):
            memory.size += size
            memory.kept += size
            return True
        return False

    def _overdue(self) -> float:
        """The number of the first waiter that too many bytes were given past; infinite if none."""
        passed = (
            waiter.number
            for waiter in self._waiters
            if waiter.passed_bytes >= self.max_bytes
            and not waiter.turn.done()
            and not self._leaves_too_little(waiter)
        )
        return min(passed, default=math.inf)

    def _must_wait(self, waiter: _Waiter, overdue: float) -> bool:
        """Whether somebody before it is overdue, or its client has enough. What has begun goes on
        all the same: others get nothing back before it ends."""
        if waiter.memory.held:
            return False
        return overdue < waiter.number or self._leaves_too_little(waiter)

    def _leaves_too_little(self, waiter: _Waiter) -> bool:
        """Whether it is one more request of a client that would then hold more than one may."""
        held = self._held[waiter.memory.client]
        if not held or waiter.memory.held:
            return False
        there_are = self._main.used_bytes + max(self._main.room_bytes, 0)
        return held + waiter.size > there_are - there_are // _OTHERS_SHARE

    def _set_alarm(self) -> None:
        if self._alarm is None:
            self._alarm = asyncio.get_running_loop().call_later(PATIENCE_S, self._hurry_clients)

    def _hurry_clients(self) -> None:
        """Somebody has waited, perhaps for those who wait for slow clients."""
        self._alarm = None
        waiting = [waiter for waiter in self._waiters if not waiter.turn.done()]
        if not waiting:
            return
        self._set_alarm()
        before = time.monotonic() - PATIENCE_S / 2
        late = [w for w in waiting if w.since < before and not self._leaves_too_little(w)]
        if late:
            next_one = min(late, key=lambda w: (self._held[w.memory.client], w.number))
            needed = next_one.size - max(self._main.room_bytes, 0)
            self.client_waits.make_way(next_one.memory.client, next_one.size, needed, self._held)

    def _stuck(self) -> _Waiter | None:
        """If all waiters deadlock (they hold all of the pool that is held, and what is left is too
        little for any of them): the latest of the client that holds the most."""
        waiting = [waiter for waiter in self._waiters if not waiter.turn.done()]
        used, overdue = self._main.used_bytes, self._overdue()
        # A waiter that would fit, but comes after an overdue one, does not move either.
        fitting = [waiter for waiter in waiting if used + waiter.size <= self.max_bytes]
        if not all(self._must_wait(waiter, overdue) for waiter in fitting):
            return None
        holders = {id(part): part for waiter in waiting for part in waiter.memory.parts()}
        held = sum(part.size - part.kept for part in holders.values())
        if not waiting or not held or held < used:
            return None
        return max(
            (waiter for waiter in waiting if waiter.memory.held),
            key=lambda waiter: (self._held[waiter.memory.client], waiter.number),
        )

    def _too_large(self, size: int) -> BodyTooLarge:
        return BodyTooLarge(
            f"This request would take {size} bytes in the server, and all requests together may "
            f"have {self.max_bytes} (server.max_bodies, and a quarter of memory.limit).",
            numbers={
                "reason": "memory",
                "domain": str(RAM),
                "needed_bytes": size,
                "limit_bytes": self.max_bytes,
            },
        )

    def _overloaded(self, size: int) -> Overloaded:
        return Overloaded(
            f"There is no memory for the {size} bytes that this request takes in the server: "
            f"{self.used_bytes} bytes of requests are held, and at most {self.max_bytes} may be "
            "(server.max_bodies and memory.limit); try again shortly.",
            retry_after_s=1,
            numbers={
                "reason": "memory",
                "domain": str(RAM),
                "needed_bytes": size,
                "limit_bytes": self._main.booked_bytes - self._main.used_bytes,
            },
        )


def _had(waiter: _Waiter) -> bool:
    """Whether its turn came in the same moment."""
    turn = waiter.turn
    return turn.done() and not turn.cancelled() and turn.exception() is None


class RequestMemory:
    """What one request holds of the pool."""

    def __init__(self, pool: RequestPool, client: str, beside: RequestMemory | None = None) -> None:
        self._pool = pool
        self._beside = beside
        self.client = client  # whose request it is
        self.size = 0
        self.kept = 0  # of it, from what is kept for small requests

    def detached(self) -> RequestMemory:
        """A part of the same request that may outlive it."""
        return RequestMemory(self._pool, self.client, beside=self)

    def parts(self) -> Iterator[RequestMemory]:
        """This part and those that it was made beside."""
        yield self
        if self._beside is not None:
            yield from self._beside.parts()

    @property
    def held(self) -> int:
        """By the whole request, as far as is known here."""
        return sum(part.size for part in self.parts())

    def waits(self, limits: Limits) -> ClientWait:
        """What this request waits for its client, who may be so slow."""
        return ClientWait(self, limits, self._pool.client_waits)

    @property
    def room_bytes(self) -> int:
        """More than this it is never given."""
        return self._pool.max_bytes - self.held

    async def grow(self, size: int) -> None:
        """Hold so much more; waits for it."""
        await self._pool.take(self, size)

    @asynccontextmanager
    async def holding(self, size: int) -> AsyncIterator[None]:
        """So much more for as long as the block runs; waits for it."""
        await self.grow(size)
        try:
            yield
        finally:
            self.shrink(size)

    def grow_now(self, size: int) -> None:
        """Hold so much more at once."""
        self._pool.take_now(self, size)

    def shrink(self, size: int) -> None:
        """Hold so much less."""
        self._pool.give(self, min(size, self.size))

    def release(self) -> None:
        """Give everything back."""
        self.shrink(self.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
