"""How many tokens a second each model generates, over the last tick of the watch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class TokenRates:
    """From counts that only grow."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        self._at: float | None = None
        self._per_s: dict[str, float] = {}

    def note(self, now: float, generated: Mapping[str, int]) -> None:
        """The counts at a moment."""
        if self._at is not None and now > self._at:
            self._per_s = {
                model: round((count - self._before.get(model, 0)) / (now - self._at), 1)
                for model, count in generated.items()
            }
        self._at, self._before = now, dict(generated)

    def of(self, model: str) -> float:
        """Of one model."""
        return self._per_s.get(model, 0.0)
