"""Recent rates (amount per second) and histograms of durations."""

from __future__ import annotations

import threading
from bisect import bisect_left

# An observation has half its weight left after so much more: bytes, usually.
_HALF_LIFE = 256 << 20


class Rate:
    """Amounts over the seconds they took, the latest counting most; safe between threads."""

    def __init__(self, half_life: int = _HALF_LIFE) -> None:
        self._half_life = half_life
        self._amount = 0.0
        self._seconds = 0.0
        self._lock = threading.Lock()

    def add(self, amount: int, seconds: float) -> None:
        """That much took `seconds`."""
        with self._lock:
            kept = 0.5 ** (amount / self._half_life)
            self._amount = self._amount * kept + amount
            self._seconds = self._seconds * kept + seconds

    @property
    def per_s(self) -> float | None:
        """None before the first."""
        with self._lock:
            return self._amount / self._seconds if self._seconds > 0 else None


# The upper ends of a histogram's buckets; what is longer than the last has none.
DURATIONS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Durations:
    """How often something took how long; used by one thread."""

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = [0] * (len(DURATIONS_S) + 1)

    def add(self, seconds: float) -> None:
        """It took so long."""
        self.sum_s += seconds
        self._counts[bisect_left(DURATIONS_S, seconds)] += 1

    def figures(self, name: str) -> dict[str, float]:
        """The counts that are not zero, by the number of their bucket: `NAME_bucket_3`."""
        return {f"{name}_bucket_{i}": float(n) for i, n in enumerate(self._counts) if n}
