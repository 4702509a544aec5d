"""Expected lengths of answers, learned from those that ended. No torch.

Learned per model from the answers that ended: a histogram over powers of two that forgets, so it
is bounded and follows its users. It says only what is likely; a wrong guess costs a recomputation.
"""

from __future__ import annotations

_BUCKETS = 24  # bucket b: lengths up to 2^b
_KEPT = 0.98  # of a bucket's weight, an answer later: the last 50 or so count
# Before the first answer has ended, as if one of about this length had.
_PRIOR_BUCKET = 9
_PRIOR_WEIGHT = 1.0


class OutputLengths:
    """The lengths of recent answers."""

    def __init__(self) -> None:
        self._weights = [0.0] * _BUCKETS
        self._weights[_PRIOR_BUCKET] = _PRIOR_WEIGHT

    def observe(self, tokens: int) -> None:
        """An answer of that many tokens has ended."""
        self._weights = [weight * _KEPT for weight in self._weights]
        self._weights[min(_bucket(tokens), _BUCKETS - 1)] += 1.0

    def remaining(self, generated: int) -> float:
        """Tokens still to come, on average, in an answer that has `generated` already."""
        longer = [(w, 1 << b) for b, w in enumerate(self._weights) if 1 << b > generated]
        weight = sum(w for w, _ in longer)
        if weight < 1e-3:  # longer than all that is remembered: as much again
            return float(max(generated, 1))
        return sum(w * (length - generated) for w, length in longer) / weight


def _bucket(tokens: int) -> int:
    return max(tokens - 1, 0).bit_length()
