"""How fast a model's queue moves, and which future slots are promised by `Retry-After`.

A rate is counted over the time in which somebody waited, from what left the worker (in bursts, when
a batch ends together) and from how far those at work have got, which is most of it in a short rush.
What an earlier rush has shown is where the next one begins from. It knows times, not requests.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_WINDOW_S = 30.0
_ENDS_KEPT = 4096
# The estimate is on the late side, so that a client that waits for it is not refused twice: the
# rate may have dropped, and requests that began together end together.
_CAUTION = 1.2
_LUMP_SHARE = 0.25
_EARLIER_WEIGHT = 4.0  # so many of this rush weigh as much as all that was seen in the last
_MIN_DONE = 2.0  # before a rate is read from them
_ENOUGH = 8.0  # of a rush, to be believed in the next
_UNKNOWN_PER_S = 0.5
_SERVICE_SHARE = 0.1  # of the latest in the usual time that one is at work


class Promise(NamedTuple):
    """What someone is told for whom there is no place now."""

    place: int  # of those that become free
    expected_s: float  # when it does, most likely
    come_s: float  # when it has, almost certainly


class ThroughputEstimator:
    """Requests per second that leave for those who wait, and the promises made on them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By slot: start time, weight, and whether others waited when it began.
        self._at_work: dict[object, tuple[float, float, bool]] = {}
        # How long one is usually at work while others wait: alone it is much sooner done.
        self._service_s = 0.0
        self._services = 0  # that were seen
        self._ends: deque[tuple[float, float]] = deque(maxlen=_ENDS_KEPT)  # of this rush
        self._since: float | None = None  # somebody waits from then on
        self._progress_then = 0.0
        self._earlier: float | None = None  # per second in the last rush
        self._promised: list[float] = []  # when those who were refused come back, in order

    def begin_backlog(self) -> None:
        """Somebody waits; more of them change nothing."""
        if self._since is None:
            self._since = self._clock()
            self._progress_then = self._progress(self._since)
            self._ends.clear()

    def end_backlog(self) -> None:
        """Nobody waits any more."""
        if self._since is not None:
            done, taken = self._seen(self._clock())
            if done >= _ENOUGH:
                self._earlier = done / max(taken, 1e-3)
        self._since = None

    def began(self, slot: object, weight: float = 1.0) -> None:
        """A slot is held from now on; `weight`: the fraction of a request that it is."""
        self._at_work[slot] = self._clock(), weight, self._since is not None

    def ended(self, slot: object) -> None:
        """It is done, or has left."""
        now = self._clock()
        since, weight, crowded = self._at_work.pop(slot)
        self._ends.append((now, weight))
        # Of a batch the short ones end first, so the first few are all of equal weight, and those
        # that others saw begin count even if nobody waits any more.
        if crowded or self._since is not None:
            self._services += 1
            blend = max(_SERVICE_SHARE, 1 / self._services)
            self._service_s += blend * (now - since - self._service_s)

    def per_s(self) -> float:
        """Requests per second; silence lowers it while somebody waits."""
        if self._since is None:
            return self._earlier or _UNKNOWN_PER_S
        done, taken = self._seen(self._clock())
        if self._earlier is not None:
            done, taken = done + _EARLIER_WEIGHT, taken + _EARLIER_WEIGHT / self._earlier
        if done < _MIN_DONE:
            return _UNKNOWN_PER_S
        return done / max(taken, 1e-3)

    def until(self, place: int) -> float:
        """Seconds until that many have started."""
        return place / self.per_s()

    def promise(self) -> Promise:
        """A place that nobody else was promised, and when to come for it.

        At every moment from then on there must be a place for each who was told to come by then:
        those who were promised one long ago, at another rate, keep theirs and block no other.
        """
        now, rate = self._clock(), self.per_s()
        lump = _LUMP_SHARE * len(self._at_work)
        del self._promised[: bisect.bisect_right(self._promised, now)]
        place = 1
        for others, due in enumerate(self._promised, 1):
            if (_CAUTION * (others + 1) + lump) / rate > due - now:
                place = others + 1
        come_s = (_CAUTION * place + lump) / rate
        bisect.insort(self._promised, now + come_s)
        return Promise(place, place / rate, come_s)

    def _seen(self, now: float) -> tuple[float, float]:
        """What this rush has brought, in requests, and in how many seconds."""
        assert self._since is not None
        begin = max(self._since, now - _WINDOW_S)
        if len(self._ends) == _ENDS_KEPT:
            begin = max(begin, self._ends[0][0])
        while self._ends and self._ends[0][0] < begin:
            self._ends.popleft()
        done = sum(weight for _, weight in self._ends)
        if begin == self._since:  # in the middle of a long rush it is about the same at both ends
            done += self._progress(now) - self._progress_then
        return max(done, 0.0), now - begin

    def _progress(self, now: float) -> float:
        """How much of those at work is done, in requests."""
        if not self._service_s:
            return 0.0
        return sum(
            weight * min((now - since) / self._service_s, 1.0)
            for since, weight, _ in self._at_work.values()
        )
