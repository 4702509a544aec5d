"""The event list: what happened recently to memory, models and their processes, with numbers.

Owns only the record. Each row has a time, a kind and whatever figures the one who adds it has.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_EVENTS_KEPT = 512


class Events:
    """The latest of them, for `/admin/api/events`; the oldest are forgotten."""

    def __init__(self) -> None:
        self._rows: deque[dict[str, object]] = deque(maxlen=_EVENTS_KEPT)
        self.listeners: list[Callable[[dict[str, object]], None]] = []
        self.counts: dict[str, int] = {}
        # By how much each process was last read to be over its books.
        self.drift: dict[str, int] = {}

    def add(self, kind: str, **fields: object) -> None:
        """Something happened."""
        row = {"at": round(time.time(), 3), "event": kind, **fields}
        self._rows.append(row)
        for hear in self.listeners:
            hear(row)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        log.info("%s", kind, extra={"fields": fields})

    def rows(self) -> list[dict[str, object]]:
        """All that are kept, the latest last."""
        return list(self._rows)
