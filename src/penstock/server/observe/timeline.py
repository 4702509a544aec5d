"""Each domain's memory over the last quarter of an hour, at a fixed resolution.

A point covers `STEP_S`: it has the highest of what was booked, read and used by others in it, and
the least that was free, so that a peak between two points is seen.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

STEP_S = 5
_KEPT = 15 * 60 // STEP_S
_HIGHEST = ("booked_bytes", "read_bytes", "external_bytes", "short")

Figures = dict[str, int | bool | None]


class Timeline:
    """The points of one server."""

    def __init__(self) -> None:
        self._points: deque[dict[str, object]] = deque(maxlen=_KEPT)
        self._domains: dict[str, Figures] = {}  # of the point that is being made
        self._until: float | None = None  # its end

    def note(self, at: float, domains: Mapping[str, Figures]) -> dict[str, object] | None:
        """The figures at a moment; the point that this completes, if it does."""
        for name, figures in domains.items():
            self._domains[name] = _joined(self._domains.get(name), figures)
        if self._until is None:
            self._until = at + STEP_S
        if at < self._until:
            return None
        point: dict[str, object] = {"at": round(at, 3), "domains": self._domains}
        self._points.append(point)
        self._domains, self._until = {}, at + STEP_S
        return point

    def points(self) -> list[dict[str, object]]:
        """Those that are kept, the latest last."""
        return list(self._points)


def _joined(before: Figures | None, now: Figures) -> Figures:
    if before is None:
        return dict(now)
    joined = dict(now)
    for name in _HIGHEST:
        joined[name] = max((before[name], now[name]), key=lambda size: -1 if size is None else size)
    joined["free_bytes"] = min(before["free_bytes"] or 0, now["free_bytes"] or 0)
    return joined
