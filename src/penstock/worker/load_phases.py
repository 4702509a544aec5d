"""What of a load takes how long."""

from __future__ import annotations

import time


class LoadPhases:
    """How long each part of a load took."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self.phases: dict[str, float] = {}

    def ended(self, name: str) -> None:
        """What was done since the last one was this."""
        now = time.perf_counter()
        self.phases[name] = round(now - self._since, 3)
        self._since = now
