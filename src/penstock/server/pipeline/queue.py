"""The queue of one model: who goes next, the expected wait, and when it is full.

A request makes a `QueuedRequest` and takes a `Slot` for each of its answers. Between API keys, or
addresses where no key is needed, the order is by the tokens that each was served; among the
requests of one key by priority (lower first), then arrival. The queue is bounded in requests and in
bytes of prompts, of which every key has a part that nobody else can take, and so it is with the
places at the worker. The worker is given only what it can start, and a few more to look ahead at,
so that fairness is decided here and waiting requests survive its death. Knows numbers of tokens and
bytes, not what a request is; it never reads a gauge.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.errors import Overloaded
from penstock.server.pipeline.fairness import Callers, ServedTokens, guaranteed, left_for
from penstock.server.pipeline.throughput import ThroughputEstimator

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from contextlib import AbstractAsyncContextManager
    from typing import NoReturn, Self

LOOK_AHEAD = 4  # slots beyond those that the worker runs
# One part in so many of the worker's places, at most, is left free for keys that have none.
_FREE_SHARE = 4


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the worker can take, as last known; the answer to one question before each start."""

    running: int  # slots that are in its batch
    sequences: int  # the most it runs at once
    kv_bytes: int
    held: bool = False  # others have taken what is booked: nobody starts now


@dataclass(slots=True, eq=False)
class Slot:
    """A place with the worker for one answer: waited for, then held."""

    queued: QueuedRequest
    kv_bytes: int  # at its longest
    prompt_tokens: int
    number: int
    served: ServedTokens
    answered: bool = False  # a token came, or the prompt alone was asked for
    # For the worker: 0 for the first of its key, 1 for its others where there are several keys.
    priority: int = 0
    started: asyncio.Future[None] = field(default_factory=asyncio.Future)

    def charge(self, tokens: int) -> None:
        """Tokens that were served beside the prompt, as they come."""
        self.answered = True
        self.served.charge(self.queued.key, tokens)


class ModelQueue:
    """The line of one model; lives as long as the server, whatever becomes of workers."""

    def __init__(
        self,
        model: str,
        *,
        max_requests: int,
        max_bytes: int,
        deadline_s: float,
        callers: Callable[[], Callers] = Callers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity: Callable[[], Capacity] = lambda: Capacity(0, 1, 0)
        self._model = model
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._deadline_s = deadline_s
        self._clock = clock
        self._numbers = itertools.count()
        self._callers = callers
        self._lines: dict[str, dict[int, deque[Slot]]] = {}  # by key, by priority; none is empty
        self._served = ServedTokens()
        self._at_work: dict[Slot, None] = {}
        self._places: Counter[str] = Counter()  # at work, by key
        self._kv_at_work = 0
        self._waiting: dict[QueuedRequest, None] = {}  # in order of arrival
        self._waiting_requests: Counter[str] = Counter()  # by key
        self._waiting_bytes: Counter[str] = Counter()
        self._rate = ThroughputEstimator(clock)

    def request(self, key: str, priority: int, size_bytes: int, answers: int = 1) -> QueuedRequest:
        """A request comes; `Overloaded` says when a place will be free if there is none."""
        keys = self._key_count(key)
        most = max(self._max_requests, self._callers().expected)
        own = self._waiting_requests[key]
        each = max(1, guaranteed(most, keys))
        if left_for(key, most, self._waiting_requests, each, keys) < 1:
            self._refuse(
                key,
                f"{len(self._waiting)} requests wait for the model {self._model!r}, {own} of them "
                "of this client, and server.queue_requests",
            )
        # A key's first request may be as large as it likes: its bytes are booked elsewhere too.
        # So there may be less than nothing left, and a key has its part all the same.
        most, each = self._max_bytes, guaranteed(self._max_bytes, keys)
        left = left_for(key, most, self._waiting_bytes, each, keys)
        if own and size_bytes > max(left, each - self._waiting_bytes[key]):
            self._refuse(
                key,
                f"{self._waiting_bytes.total()} bytes of prompts wait for the model "
                f"{self._model!r}, {self._waiting_bytes[key]} of them of this client, and "
                "server.queue_bytes",
            )
        return QueuedRequest(self, key, priority, size_bytes, self._clock(), answers)

    def _key_count(self, key: str) -> int:
        """How many keys share: those that are expected, or more if there are more."""
        return max(self._callers().expected, len(self._waiting_requests.keys() | {key}))

    def _refuse(self, key: str, what: str) -> NoReturn:
        promise = self._rate.promise()
        raise Overloaded(
            f"{what} allows no more; a place is expected in {promise.expected_s:.1f} s.",
            retry_after_s=promise.come_s,
            numbers={
                "reason": "queue",
                "waiting": len(self._waiting),
                "waiting_of_key": self._waiting_requests[key],
                "starts_per_s": round(self._rate.per_s(), 3),
                "place": promise.place,
                "expected_s": round(promise.expected_s, 3),
            },
        )

    def pump(self) -> None:
        """Start whom there is room for; called when a slot ends, after each step, and when memory
        that others had taken is back."""
        while self._lines:
            capacity = self.capacity()
            slot = self._next(capacity.sequences)
            if slot is None or not self._may_start(slot, capacity):
                return
            self._forget(slot)
            if not slot.started.done():  # else given up in the same moment
                self._start(slot)

    def places(self) -> dict[QueuedRequest, tuple[int, float]]:
        """Everyone in line: place, from 1, and seconds until the expected start."""
        return {
            queued: (place, round(self._rate.until(place), 1))
            for place, queued in enumerate(self._in_order(), 1)
        }

    @property
    def waiting(self) -> int:
        """Requests of which nothing has started."""
        return len(self._waiting)

    @property
    def at_work(self) -> int:
        """Slots held."""
        return len(self._at_work)

    def check(self) -> None:
        """The counts agree with what is there."""
        assert self._kv_at_work == sum(slot.kv_bytes for slot in self._at_work)
        assert self._places == Counter(slot.queued.key for slot in self._at_work)
        assert self._waiting_requests == Counter(queued.key for queued in self._waiting)
        assert self._waiting_bytes.total() == sum(queued.size_bytes for queued in self._waiting)
        assert len(self._waiting) <= max(self._max_requests, self._key_count(""))
        assert all(not slot.started.done() for slot in self._waiting_slots())
        assert all(line and all(line.values()) for line in self._lines.values())
        self._served.check()

    # --- for QueuedRequest ---

    def now(self) -> float:
        """On the line's clock."""
        return self._clock()

    def join(self, queued: QueuedRequest) -> None:
        """Add the request to the line."""
        self._served.enter(queued.key)
        self._waiting[queued] = None
        self._waiting_requests[queued.key] += 1
        self._waiting_bytes[queued.key] += queued.size_bytes

    def leave(self, queued: QueuedRequest) -> None:
        """Remove it: it is over, or was never begun."""
        self._no_longer_waits(queued)
        self._served.leave(queued.key)

    @asynccontextmanager
    async def slot(
        self, queued: QueuedRequest, kv_bytes: int, prompt_tokens: int
    ) -> AsyncIterator[Slot]:
        """Wait for a place with the worker; it is held until the block ends."""
        slot = Slot(queued, kv_bytes, prompt_tokens, next(self._numbers), self._served)
        self._lines.setdefault(queued.key, {}).setdefault(queued.priority, deque()).append(slot)
        self.pump()
        self._note_crowd()
        try:
            await self._until_started(slot)
            yield slot
        finally:
            if slot in self._at_work:
                del self._at_work[slot]
                self._kv_at_work -= kv_bytes
                _take_away(self._places, queued.key, 1)
                self._rate.ended(slot)
                if not slot.answered:  # cancelled, or to be tried again: it was served nothing
                    self._served.charge(queued.key, -prompt_tokens)
            else:
                self._forget(slot)
            self.pump()
            self._note_crowd()

    def _note_crowd(self) -> None:
        """Tell the rate whether anyone waits for a place; a request that waits for a load or for
        memory is in the line too, but no start would help it."""
        if any(True for _ in self._waiting_slots()):
            self._rate.begin_backlog()
        else:
            self._rate.end_backlog()

    async def _until_started(self, slot: Slot) -> None:
        left = slot.queued.waits_since + self._deadline_s - self._clock()
        try:
            async with asyncio.timeout(max(left, 0.0) if not slot.started.done() else None):
                await slot.started
        except TimeoutError:
            raise Overloaded(
                f"The request waited {self._deadline_s:g} s for a place at the model "
                f"{self._model!r} (server.queue_deadline_s).",
                retry_after_s=self._rate.promise().come_s,
                numbers={"reason": "deadline", "waiting": len(self._waiting)},
            ) from None

    def _start(self, slot: Slot) -> None:
        self._at_work[slot] = None
        slot.priority = int(self._callers().several and self._places[slot.queued.key] > 0)
        self._places[slot.queued.key] += 1
        self._kv_at_work += slot.kv_bytes
        self._served.charge(slot.queued.key, slot.prompt_tokens)
        self._rate.began(slot, 1 / slot.queued.answers)
        self._no_longer_waits(slot.queued)
        slot.started.set_result(None)

    def _no_longer_waits(self, queued: QueuedRequest) -> None:
        if queued in self._waiting:
            del self._waiting[queued]
            _take_away(self._waiting_requests, queued.key, 1)
            _take_away(self._waiting_bytes, queued.key, queued.size_bytes)

    def _may_start(self, slot: Slot, capacity: Capacity) -> bool:
        if capacity.held or not self._at_work:
            return not capacity.held
        callers = self._callers()
        newcomer = callers.several and not self._places[slot.queued.key]
        if newcomer and len(self._places) < callers.expected:
            return True  # the worker has kept something for it
        fits = self._kv_at_work + slot.kv_bytes <= capacity.kv_bytes
        if fits and self.at_work < capacity.sequences:
            return True
        return self.at_work - capacity.running < LOOK_AHEAD

    def _next(self, sequences: int) -> Slot | None:
        """Of the key that was served least, among those that may have another place, the slot that
        goes first by priority and arrival.

        The last places are for keys that have none, and nothing is given ahead to a full batch that
        several keys share: long answers of one key would otherwise keep all others waiting to
        their end.
        """
        callers = self._callers()
        # Of those who only might come, places are not kept free.
        keys = len(self._lines.keys() | self._places) if callers.anybody else callers.expected
        kept = min(keys - len(self._places), sequences // _FREE_SHARE)
        crowded = keys > 1 and sequences - self.at_work <= kept
        heads = [
            line[min(line)][0]
            for key, line in self._lines.items()
            if not (crowded and self._places[key])
        ]
        return min(heads, key=lambda s: (self._served.of(s.queued.key), s.number), default=None)

    def _in_order(self) -> Iterator[QueuedRequest]:
        """Those who wait, about as they will start: keys in turn, each by priority and arrival."""
        order = sorted(self._waiting, key=lambda queued: (queued.priority, queued.arrived))
        place: Counter[str] = Counter()
        ranked: list[tuple[int, int, int, QueuedRequest]] = []
        for queued in order:
            ranked.append((place[queued.key], self._served.of(queued.key), len(ranked), queued))
            place[queued.key] += 1
        return (queued for *_, queued in sorted(ranked, key=lambda row: row[:3]))

    def _waiting_slots(self) -> Iterator[Slot]:
        for line in self._lines.values():
            for slots in line.values():
                yield from slots

    def _forget(self, slot: Slot) -> None:
        """It stands in the line no longer."""
        key, priority = slot.queued.key, slot.queued.priority
        slots = self._lines.get(key, {}).get(priority)
        if slots is None or slot not in slots:
            return
        slots.remove(slot)
        if not slots:
            del self._lines[key][priority]
        if not self._lines[key]:
            del self._lines[key]


def _take_away(counts: Counter[str], key: str, size: int) -> None:
    counts[key] -= size
    if not counts[key]:
        del counts[key]


class QueuedRequest:
    """One request in the line, from its arrival to its last answer; a context manager."""

    def __init__(
        self,
        queue: ModelQueue,
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
        self.waits_since = arrived
        self._queue = queue

    def progressed(self) -> None:
        """Part of it is done: what is left of it waits from now on."""
        self.waits_since = self._queue.now()

    def slot(self, kv_bytes: int, prompt_tokens: int) -> AbstractAsyncContextManager[Slot]:
        """An async context manager: waits for a place with the worker, and holds it."""
        return self._queue.slot(self, kv_bytes, prompt_tokens)

    def __enter__(self) -> Self:
        self._queue.join(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.leave(self)


async def run_together(work: list[Coroutine[None, None, None]]) -> None:
    """Run all answers to a request; the first failure, or the end of us, ends the others."""
    if len(work) == 1:
        await work[0]
        return
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
