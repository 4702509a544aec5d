"""How long answers come to be, and how much KV a batch will need at its highest. No torch.

Learned per model from the answers that ended: a histogram over powers of two that forgets, so it
is bounded and follows its users. It says only what is likely; a wrong guess costs a recomputation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_BUCKETS = 24  # bucket b: lengths up to 2^b
_KEPT = 0.98  # of a bucket's weight, an answer later: the last 50 or so count
# Before the first answer has ended, as if one of about this length had.
_PRIOR_BUCKET = 9
_PRIOR_WEIGHT = 1.0


class OutputLengths:
    """The lengths of recent answers."""

    def __init__(self) -> None:
        self._weights = [0.0] * _BUCKETS
        self.reset()

    def reset(self) -> None:
        """Forget everything learned."""
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

    @property
    def mean(self) -> float:
        """The expected length of a new answer."""
        return self.remaining(0)


def _bucket(tokens: int) -> int:
    return max(tokens - 1, 0).bit_length()


def future_peak_blocks(sequences: Iterable[tuple[int, int]], block_tokens: int) -> int:
    """The most blocks held at once by sequences of (tokens now, tokens to come), decoded together.

    What is held only rises until somebody ends, so the peak is at one of the ends: when the one
    with r to come ends, everyone with at least r to come has grown by r, and the rest is gone.

        held |        /|      sorted by what is to come, longest first, the peak at the i-th end
             |  /|  /  |  /|  is the sum over the first i of (tokens now + r_i), in whole blocks
             |/  |/    |/  |

    Sequences are counted by what they have in their last block, so that the sum needs no second
    loop over them.
    """
    peak = whole = 0
    in_last_block = [0] * block_tokens
    by_remaining = sorted(sequences, key=lambda pair: -pair[1])
    for count, (now, remaining) in enumerate(by_remaining, 1):
        whole += now // block_tokens
        in_last_block[now % block_tokens] += 1
        blocks, rest = divmod(remaining, block_tokens)
        begun = sum(n * -(-(has + rest) // block_tokens) for has, n in enumerate(in_last_block))
        peak = max(peak, whole + count * blocks + begun)
    return peak
