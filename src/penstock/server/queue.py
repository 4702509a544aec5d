"""The line in front of one model: who goes next, how long it will take, and when it is full.

A request makes a `Visit` and takes a `turn` for each of its answers. The line is bounded in
requests and in bytes of prompts; order is priority class (lower first), then fair between API
keys by the tokens they were served, then arrival. The worker is given only what it can start, and
a few more to look ahead at, so that fairness is decided here and waiting requests survive its
death. Knows numbers of tokens and bytes, not what a request is; it never reads a gauge.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.errors import Overloaded
from penstock.server.drain import DrainRate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from typing import Self

LOOK_AHEAD = 4  # turns beyond those that the worker runs


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the worker can take, as last known; the answer to one question before each start."""

    running: int  # turns that are in its batch
    sequences: int  # the most it runs at once
    kv_bytes: int
    held: bool = False  # others have taken what is booked: nobody starts now


@dataclass(slots=True, eq=False)
class _Turn:
    visit: Visit
    kv_bytes: int  # at its longest
    tokens: int  # what it costs its key
    number: int
    started: asyncio.Future[None] = field(default_factory=asyncio.Future)


class Lane:
    """The line of one model; lives as long as the server, whatever becomes of workers."""

    def __init__(
        self,
        model: str,
        *,
        most_requests: int,
        most_bytes: int,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity: Callable[[], Capacity] = lambda: Capacity(0, 1, 0)
        self._model = model
        self._most_requests = most_requests
        self._most_bytes = most_bytes
        self._deadline_s = deadline_s
        self._clock = clock
        self._numbers = itertools.count()
        self._lines: dict[int, dict[str, deque[_Turn]]] = {}  # by priority, by key
        self._present: dict[str, int] = {}  # visits by key
        self._served: dict[str, float] = {}  # tokens by key, only of those present
        self._at_work: dict[_Turn, None] = {}
        self._kv_at_work = 0
        self._waiting: dict[Visit, None] = {}  # in order of arrival
        self._waiting_bytes = 0
        self._rate = DrainRate(clock)

    def visit(self, key: str, priority: int, size_bytes: int, answers: int = 1) -> Visit:
        """A request comes; `Overloaded` says when a place will be free if there is none."""
        requests, held = len(self._waiting), self._waiting_bytes
        full = requests >= self._most_requests
        # One request alone may be as large as it likes: its bytes are booked elsewhere too.
        if full or (self._waiting and held + size_bytes > self._most_bytes):
            promise = self._rate.promise()
            what = (
                f"{requests} requests wait for the model {self._model!r}, and server.queue_requests"
                if full
                else f"{held} bytes of prompts wait for the model {self._model!r}, and "
                "server.queue_bytes"
            )
            raise Overloaded(
                f"{what} allows no more; a place is expected in {promise.expected_s:.1f} s.",
                retry_after_s=promise.come_s,
                numbers={
                    "reason": "queue",
                    "waiting": requests,
                    "starts_per_s": round(self._rate.per_s(), 3),
                    "place": promise.place,
                    "expected_s": round(promise.expected_s, 3),
                },
            )
        return Visit(self, key, priority, size_bytes, self._clock(), answers)

    def pump(self) -> None:
        """Start whom there is room for; called when a turn ends, after each step, and when memory
        that others had taken is back."""
        while (turn := self._next()) is not None and self._may_start(turn):
            self._lines[turn.visit.priority][turn.visit.key].popleft()
            if turn.started.done():  # given up in the same moment
                continue
            self._start(turn)

    def rows(self) -> list[dict[str, object]]:
        """Everyone in line, with place and expected start, for `/admin`."""
        now = self._clock()
        return [
            {
                "model": self._model,
                "key": visit.key,
                "priority": visit.priority,
                "place": place,
                "waited_s": round(now - visit.arrived, 1),
                "expected_start_s": round(self._rate.until(place), 1),
            }
            for place, visit in enumerate(self._in_order(), 1)
        ]

    @property
    def waiting(self) -> int:
        """Requests of which nothing has started."""
        return len(self._waiting)

    @property
    def at_work(self) -> int:
        """Turns with the worker."""
        return len(self._at_work)

    def check(self) -> None:
        """The counts agree with what is there."""
        assert self._kv_at_work == sum(turn.kv_bytes for turn in self._at_work)
        assert self._waiting_bytes == sum(visit.size_bytes for visit in self._waiting)
        assert len(self._waiting) <= self._most_requests
        assert all(not turn.started.done() for turn in self._turns())

    # --- for visits ---

    def join(self, visit: Visit) -> None:
        """The visit waits from now on."""
        # Who comes back does not get what it missed while away.
        self._served.setdefault(visit.key, min(self._served.values(), default=0.0))
        self._present[visit.key] = self._present.get(visit.key, 0) + 1
        self._waiting[visit] = None
        self._waiting_bytes += visit.size_bytes

    def leave(self, visit: Visit) -> None:
        """The visit is over, or was never begun."""
        self._no_longer_waits(visit)
        self._present[visit.key] -= 1
        if not self._present[visit.key]:
            del self._present[visit.key], self._served[visit.key]

    @asynccontextmanager
    async def turn(self, visit: Visit, kv_bytes: int, tokens: int) -> AsyncIterator[None]:
        """Wait for a place with the worker; it is held until the block ends."""
        turn = _Turn(visit, kv_bytes, tokens, next(self._numbers))
        self._lines.setdefault(visit.priority, {}).setdefault(visit.key, deque()).append(turn)
        self.pump()
        self._note_crowd()
        try:
            await self._until_started(turn)
            yield
        finally:
            if turn in self._at_work:
                del self._at_work[turn]
                self._kv_at_work -= kv_bytes
                self._rate.ended(turn)
            else:
                self._forget(turn)
            self.pump()
            self._note_crowd()

    def _note_crowd(self) -> None:
        """Tell the rate whether anyone waits for a place; a request that waits for a load or for
        memory is in the line too, but no start would help it."""
        if any(True for _ in self._turns()):
            self._rate.crowd()
        else:
            self._rate.cleared()

    async def _until_started(self, turn: _Turn) -> None:
        left = turn.visit.arrived + self._deadline_s - self._clock()
        try:
            async with asyncio.timeout(max(left, 0.0) if not turn.started.done() else None):
                await turn.started
        except TimeoutError:
            raise Overloaded(
                f"The request waited {self._deadline_s:g} s for its turn at the model "
                f"{self._model!r} (server.queue_deadline_s).",
                retry_after_s=self._rate.promise().come_s,
                numbers={"reason": "deadline", "waiting": len(self._waiting)},
            ) from None

    def _start(self, turn: _Turn) -> None:
        self._at_work[turn] = None
        self._kv_at_work += turn.kv_bytes
        self._served[turn.visit.key] += turn.tokens
        self._rate.began(turn, 1 / turn.visit.answers)
        self._no_longer_waits(turn.visit)
        turn.started.set_result(None)

    def _no_longer_waits(self, visit: Visit) -> None:
        if visit in self._waiting:
            del self._waiting[visit]
            self._waiting_bytes -= visit.size_bytes

    def _may_start(self, turn: _Turn) -> bool:
        if not self._at_work:
            return not self.capacity().held
        capacity = self.capacity()
        if capacity.held:
            return False
        fits = self._kv_at_work + turn.kv_bytes <= capacity.kv_bytes
        if fits and len(self._at_work) < capacity.sequences:
            return True
        return len(self._at_work) - capacity.running < LOOK_AHEAD

    def _next(self) -> _Turn | None:
        for priority in sorted(self._lines):
            line = {key: turns for key, turns in self._lines[priority].items() if turns}
            if not line:
                del self._lines[priority]
                continue
            self._lines[priority] = line
            key = min(line, key=lambda k: (self._served[k], line[k][0].number))
            return line[key][0]
        return None

    def _in_order(self) -> Iterator[Visit]:
        """Those who wait, about as they will start: priority, then arrival."""
        return iter(sorted(self._waiting, key=lambda visit: (visit.priority, visit.arrived)))

    def _turns(self) -> Iterator[_Turn]:
        for line in self._lines.values():
            for turns in line.values():
                yield from turns

    def _forget(self, turn: _Turn) -> None:
        line = self._lines.get(turn.visit.priority, {}).get(turn.visit.key)
        if line is not None and turn in line:
            line.remove(turn)


class Visit:
    """One request in the line, from its arrival to its last answer; a context manager."""

    def __init__(
        self,
        lane: Lane,
        key: str,
        priority: int,
        size_bytes: int,
        arrived: float,
        answers: int = 1,
    ) -> None:
        self.key = key
        self.answers = answers
        self.priority = priority
        self.size_bytes = size_bytes
        self.arrived = arrived
        self._lane = lane

    def turn(self, kv_bytes: int, tokens: int) -> AbstractAsyncContextManager[None]:
        """An async context manager: waits for a place with the worker, and holds it."""
        return self._lane.turn(self, kv_bytes, tokens)

    def __enter__(self) -> Self:
        self._lane.join(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lane.leave(self)
