"""How many tokens a step may have so that running streams keep their pace. No clock, no torch.

A step's duration is modelled as `base + per_token x prefill tokens`, both learned from the steps
just run: the base from steps with decodes only, the rest from steps with chunks in them. Both are
moving averages, so a mistake is forgotten within a few steps. What a chunk of few tokens adds to a
step is mostly noise: it counts for little, and makes older ones count for little less.
"""

from __future__ import annotations

_WEIGHT = 0.3  # of the newest measurement
_WHOLE_CHUNK = 64  # tokens; of smaller chunks the weight is less
_AIM = 0.8  # of the target: durations of equal steps differ by about as much


class StepPacer:
    """Turns a target step time into a bound on prefill tokens."""

    def __init__(self, target_s: float | None, floor_tokens: int = 16) -> None:
        self._aim_s = None if target_s is None else _AIM * target_s
        self._floor = floor_tokens
        self.crowded = False  # other models wait for this step too
        self._base_s = 0.0  # a step with decodes only
        self._token_s = 0.0  # each prefill token on top
        self._evidence = 0.0  # for that, in whole chunks

    def chunk_limit(self, decodes: int, prompts: int = 1) -> int | None:
        """The most prefill tokens of `prompts` beside `decodes` running streams; None: no bound."""
        if self._aim_s is None or not (decodes or prompts > 1 or self.crowded):
            return None  # nobody waits for this step but the prompt itself
        if self._token_s == 0.0:
            return self._floor  # not measured yet: learn from a small step
        # Where decoding alone comes near the target, a prompt still gets half of the time.
        base_s = self._base_s if decodes else 0.0
        room_s = max(self._aim_s - base_s, base_s)
        return max(self._floor, int(room_s / self._token_s))

    def observe(
        self, decodes: int, prefill_tokens: int, duration_s: float, drafts: int = 0
    ) -> None:
        """Learn from a step that has run. A row of a draft beside a chunk costs what one of the
        chunk does; without one the step is no measure of plain decoding."""
        if prefill_tokens == 0:
            if decodes and not drafts:
                self._base_s = _blend(self._base_s, duration_s)
            return
        prefill_tokens += drafts
        # Where little is known the tokens are taken to be all of the step. Too few of them in the
        # next are made up for at once; too many would be waited for.
        base_s = self._base_s * min(1.0, self._evidence) if decodes else 0.0
        token_s = max(duration_s - base_s, 0.0) / prefill_tokens
        share = min(1.0, prefill_tokens / _WHOLE_CHUNK)
        known = (1 - _WEIGHT * share) * self._evidence
        self._evidence = known + share
        self._token_s = (known * self._token_s + share * token_s) / self._evidence


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else (1 - _WEIGHT) * old + _WEIGHT * new
