"""The latest refusals for lack of room, with their numbers and what would have been accepted."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.errors import PenstockError

KEPT = 256
_FOR_ROOM = frozenset({413, 503, 507})
_PROBE = "/ready"


class Refusals:
    """Of one server; the oldest are forgotten, the counts are not."""

    def __init__(self) -> None:
        self._rows: deque[dict[str, object]] = deque(maxlen=KEPT)
        self.counts: Counter[tuple[str, str]] = Counter()  # of all refusals, by (code, reason)
        self.on_add: Callable[[dict[str, object]], None] = lambda _: None

    def add(self, error: PenstockError, request: Mapping[str, object], status: int) -> None:
        """A request was refused: `request` says which (id, route, model, key)."""
        numbers = error.numbers or {}
        self.counts[error.code, str(numbers.get("reason", ""))] += 1
        operators = str(request.get("route", "")).startswith("/admin/")
        if error.numbers is None and (error.status not in _FOR_ROOM or operators):
            return  # an operator is told of a task or a load that was cancelled or is busy
        if request.get("route") == _PROBE:  # asked every second while a model loads
            return
        row = {
            "at": round(time.time(), 3),
            **request,
            "status": status,
            "code": error.code,
            "message": error.message,
            "numbers": error.numbers,
            "fits": {
                "tokens": numbers.get("limit_tokens"),
                "bytes": numbers.get("limit_bytes"),
            },
            "retry_after_s": error.retry_after_s,
        }
        self._rows.append(row)
        self.on_add(row)

    def rows(self) -> list[dict[str, object]]:
        """Those that are kept, the latest last."""
        return list(self._rows)
