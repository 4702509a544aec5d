"""How much a second, of late."""

from __future__ import annotations

import threading

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
