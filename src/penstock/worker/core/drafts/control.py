"""How many drafts a step verifies: as many as make the most tokens a second. No clock.

What steps of so many rows take is learned from those that run. What was not measured of late is
taken from the nearest that was, by the proportions that were measured when the model was loaded. A
plain step is run now and then, so that there is something to compare with.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_WEIGHT = 0.3  # of the newest measurement
_WILD = 2.0  # times what was known: more is somebody else's doing
_FORGOTTEN = 512  # steps after which a time is not known any more
# Where nothing was measured one row takes as long as so many on top of it: reading the weights is
# most of the work.
_ROWS_IN_ONE = 8.0
_PLAIN_EVERY = 64  # steps
_WORTH = 1.03  # times the tokens a second of a plain step, or it is not worth the trouble


class _Time(NamedTuple):
    seconds: float
    step: int  # at which it was measured


class StepTimes:
    """What a step of so many rows takes."""

    def __init__(self, measured: Sequence[tuple[int, float]] = ()) -> None:
        """`measured`: rows and seconds, by rows, in whose proportion others are."""
        self._measured = measured
        self._known: dict[int, _Time] = {}
        self._steps = 0

    def observe(self, rows: int, duration_s: float) -> None:
        """Learn from a step of decodes and drafts alone."""
        self._steps += 1
        known = self._known.get(rows)
        if known is not None and self._is_fresh(known):
            tame = min(max(duration_s, known.seconds / _WILD), known.seconds * _WILD)
            duration_s = (1 - _WEIGHT) * known.seconds + _WEIGHT * tame
        self._known[rows] = _Time(duration_s, self._steps)

    def of(self, rows: Sequence[int]) -> list[float]:
        """For several numbers of rows; in seconds, or in any unit while nothing is known."""
        known = sorted(
            (rows, time.seconds) for rows, time in self._known.items() if self._is_fresh(time)
        )
        return [self._near(known, count) for count in rows]

    def _near(self, known: list[tuple[int, float]], rows: int) -> float:
        """As long as the nearest that is known, in proportion."""
        if not known:
            return self._in_proportion(rows)
        place = bisect_left(known, (rows, 0.0))
        nearest, seconds = min(known[max(0, place - 1) : place + 1], key=lambda k: abs(k[0] - rows))
        if nearest == rows:
            return seconds
        return seconds * self._in_proportion(rows) / self._in_proportion(nearest)

    def _in_proportion(self, rows: int) -> float:
        measured = self._measured
        place = bisect_left(measured, (rows, 0.0))
        if place < len(measured) and measured[place][0] == rows:
            return measured[place][1]
        if 0 < place < len(measured):
            (below, less), (above, more) = measured[place - 1 : place + 1]
            return less + (rows - below) / (above - below) * (more - less)
        last, seconds = measured[-1] if measured else (1, _ROWS_IN_ONE + 1)
        return seconds * (_ROWS_IN_ONE + rows) / (_ROWS_IN_ONE + last)

    def _is_fresh(self, time: _Time) -> bool:
        return self._steps - time.step < _FORGOTTEN


class DraftControl:
    """Decides for each step."""

    def __init__(self, measured: Sequence[tuple[int, float]] = ()) -> None:
        """`measured`: rows and seconds of steps, by rows."""
        self._times = StepTimes(measured)
        self._since_plain = 0  # steps

    def observe(self, rows: int, drafts: int, duration_s: float) -> None:
        """A step of decodes has run."""
        self._times.observe(rows, duration_s)
        self._since_plain = self._since_plain + 1 if drafts else 0

    @property
    def wants_plain(self) -> bool:
        """It has been too long since a step without drafts."""
        return self._since_plain >= _PLAIN_EVERY

    def choose(self, survivals: Sequence[Sequence[float]], streams: int, spare: int) -> list[int]:
        """Whose drafts a step beside `streams` rows should have, the surest first: places in
        `survivals`, each as often as it gets a draft. Those have of each draft the chance to be
        kept, so that none stands before one that it depends on."""
        if self.wants_plain:
            return []
        sorted_drafts = sorted(
            (-chance, depth, place)
            for place, chances in enumerate(survivals)
            for depth, chance in enumerate(chances)
        )[: max(0, spare)]
        times = self._times.of(range(streams, streams + len(sorted_drafts) + 1))
        best, count, tokens = _WORTH * streams / times[0], 0, float(streams)
        for number, (chance, _, _) in enumerate(sorted_drafts, 1):
            tokens -= chance
            if tokens / times[number] > best:
                best, count = tokens / times[number], number
        return [place for _, _, place in sorted_drafts[:count]]
