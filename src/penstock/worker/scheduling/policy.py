"""How many tokens a step may have so that running streams keep their pace. No clock, no torch.

A step's duration is modelled as `base + per_token x prefill tokens`, both learned from the steps
just run: the base from steps with decodes only, the rest from steps with chunks in them. Both are
moving averages, so a mistake is forgotten within a few steps.
"""

from __future__ import annotations

_WEIGHT = 0.3  # of the newest measurement


class StepPacer:
    """Turns a target step time into a bound on prefill tokens."""

    def __init__(self, target_s: float | None, floor_tokens: int = 16) -> None:
        self._target_s = target_s
        self._floor = floor_tokens
        self.crowded = False  # other models wait for this step too
        self._base_s = 0.0  # a step with decodes only
        self._token_s = 0.0  # each prefill token on top

    def chunk_limit(self, decodes: int) -> int | None:
        """The most prefill tokens beside `decodes` running streams; None: no bound."""
        if self._target_s is None or not (decodes or self.crowded):
            return None  # nobody waits for this step but the prompt itself
        if self._token_s == 0.0:
            return self._floor  # not measured yet: learn from a small step
        # Where decoding alone comes near the target, a prompt still gets half of the time.
        room_s = max(self._target_s - self._base_s, self._base_s)
        return max(self._floor, int(room_s / self._token_s))

    def observe(self, decodes: int, prefill_tokens: int, duration_s: float) -> None:
        """Learn from a step that has run."""
        if prefill_tokens == 0:
            if decodes:
                self._base_s = _blend(self._base_s, duration_s)
            return
        base = self._base_s if decodes else 0.0
        self._token_s = _blend(self._token_s, max(duration_s - base, 0.0) / prefill_tokens)


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else (1 - _WEIGHT) * old + _WEIGHT * new
