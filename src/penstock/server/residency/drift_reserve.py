"""Bytes kept beyond what a process was measured to take, after it was once read to take more.

It rises at once to the largest excess, up to a bound, holds for a while, then halves until it
is gone; `reset` forgets it. So one odd moment is neither ignored nor paid for for ever.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HOLD_S = 60.0
NOISE_BYTES = 8 << 20  # smaller differences are noise


class DriftReserve:
    """By how much one process was over its books."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes = 0
        self._max_bytes = max_bytes
        self._clock = clock
        self._since = clock()

    def observe(self, excess_bytes: int) -> None:
        """The process was read to hold so much more than was expected, or less."""
        now = self._clock()
        wanted = min(excess_bytes, self._max_bytes)
        if wanted > NOISE_BYTES and wanted >= self.bytes:
            self.bytes, self._since = wanted, now
        elif self.bytes and now - self._since >= HOLD_S:
            self.bytes = self.bytes // 2 if self.bytes // 2 > NOISE_BYTES else 0
            self._since = now

    def reset(self) -> None:
        """Forget it."""
        self.bytes = 0
