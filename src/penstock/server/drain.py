"""How fast a line moves, and which of the places that become free are spoken for.

A rate is counted over the time in which somebody waited, for starts come in bursts: a batch ends
together. What an earlier rush has shown is where the next one begins from. It knows times, not
requests.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_WINDOW_S = 30.0
_STARTS_KEPT = 4096
_CAUTION = 1.1  # a little late is better than refused twice
_EARLIER_WEIGHT = 4.0  # starts of this rush weigh as much as all that was seen in the last
_LEAST_STARTS = 2  # before a rate is read from them
_UNKNOWN_PER_S = 0.5
_ENOUGH_STARTS = 8  # of a rush, to be believed in the next


class DrainRate:
    """Starts per second of those who had to wait, and the promises made on them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._starts: deque[float] = deque(maxlen=_STARTS_KEPT)  # of this rush
        self._since: float | None = None  # somebody waits from then on
        self._earlier: float | None = None  # starts per second in the last rush
        self._promised: list[float] = []  # when those who were refused come back, in order

    def crowd(self) -> None:
        """Somebody waits; more of them change nothing."""
        if self._since is None:
            self._since = self._clock()
            self._starts.clear()

    def cleared(self) -> None:
        """Nobody waits any more."""
        if self._since is not None and len(self._starts) >= _ENOUGH_STARTS:
            taken = self._starts[-1] - max(self._since, self._starts[-1] - _WINDOW_S)
            self._forget_old(self._starts[-1])
            self._earlier = len(self._starts) / max(taken, 1e-3)
        self._since = None

    def started(self) -> None:
        """One who waited has gone to the worker."""
        self._starts.append(self._clock())

    def per_s(self) -> float:
        """Starts per second; silence lowers it while somebody waits."""
        if self._since is None:
            return self._earlier or _UNKNOWN_PER_S
        now = self._clock()
        self._forget_old(now)
        begin = max(self._since, now - _WINDOW_S)
        if len(self._starts) == _STARTS_KEPT:
            begin = max(begin, self._starts[0])
        seen, taken = float(len(self._starts)), now - begin
        if self._earlier is not None:
            seen, taken = seen + _EARLIER_WEIGHT, taken + _EARLIER_WEIGHT / self._earlier
        if seen < _LEAST_STARTS:
            return _UNKNOWN_PER_S
        return seen / max(taken, 1e-3)

    def until(self, place: int) -> float:
        """Seconds until that many have started."""
        return place / self.per_s()

    def promise(self) -> tuple[float, int]:
        """Seconds until a place is free that nobody else was promised, and which one that is.

        At every moment from then on there must be a place for each who was told to come by then:
        those who were promised one long ago, at another rate, keep theirs and block no other.
        """
        now, every_s = self._clock(), _CAUTION / self.per_s()
        del self._promised[: bisect.bisect_right(self._promised, now)]
        place = 1
        for others, due in enumerate(self._promised, 1):
            if (others + 1) * every_s > due - now:
                place = others + 1
        bisect.insort(self._promised, now + place * every_s)
        return place * every_s, place

    def _forget_old(self, now: float) -> None:
        while self._starts and now - self._starts[0] > _WINDOW_S:
            self._starts.popleft()
