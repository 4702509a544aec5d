"""How many bytes a second, of late."""

from __future__ import annotations

import threading

# An observation has half its weight left after so many bytes more.
_HALF_LIFE_BYTES = 256 << 20


class Rate:
    """Bytes over the seconds they took, the latest counting most; safe between threads."""

    def __init__(self, half_life_bytes: int = _HALF_LIFE_BYTES) -> None:
        self._half_life = half_life_bytes
        self._bytes = 0.0
        self._seconds = 0.0
        self._lock = threading.Lock()

    def add(self, size: int, seconds: float) -> None:
        """`size` bytes took `seconds`."""
        with self._lock:
            kept = 0.5 ** (size / self._half_life)
            self._bytes = self._bytes * kept + size
            self._seconds = self._seconds * kept + seconds

    @property
    def bytes_per_s(self) -> float | None:
        """None before the first."""
        with self._lock:
            return self._bytes / self._seconds if self._seconds > 0 else None
