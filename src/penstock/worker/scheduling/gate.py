"""May a step of this shape run? Predicted bytes against what steps are granted. No torch.

A prediction is the cost model's envelope, widened for a while after it was found wrong: a step
that ran out of memory or took more than was predicted. The widening is bounded, decays with every
step and can be reset, so that a bad moment does not become a slow model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.memory.cost import CostModel

WIDEST = 2.0
_AFTER_EXHAUSTION = 1.25  # the factor by which a failed step widens
_ABOVE_SURPRISE = 1.05  # how far above the step that took more than was predicted
_KEPT = 0.98  # of the widening, a step later


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's bytes depend on."""

    tokens: int = 0
    sequences: int = 0
    context: int = 0  # the longest that one of its sequences sees
    logit_rows: int = 0

    def plus(self, tokens: int, context: int, logit_rows: int, sequences: int = 1) -> StepShape:
        """With more sequences."""
        return StepShape(
            self.tokens + tokens,
            self.sequences + sequences,
            max(self.context, context),
            self.logit_rows + logit_rows,
        )


class StepGate:
    """Judges shapes; `room_bytes` is set from the latest reading before each step."""

    def __init__(self, cost: CostModel, granted_bytes: int) -> None:
        self._cost = cost
        self.granted_bytes = granted_bytes
        self.room_bytes = granted_bytes
        self.widening = 1.0
        self.pinched = False  # a shape was turned away since this was last cleared

    def expected(self, shape: StepShape) -> int:
        """The measured envelope itself."""
        return self._cost.step(shape.tokens, shape.sequences, shape.context, shape.logit_rows)

    def predicted(self, shape: StepShape) -> int:
        """The envelope, as wide as it is now."""
        return int(self.expected(shape) * self.widening)

    def admits(self, shape: StepShape) -> bool:
        """Whether such a step may be planned."""
        fits = self.predicted(shape) <= self.room_bytes
        self.pinched |= not fits
        return fits

    def can_ever_run(self, shape: StepShape) -> bool:
        """Whether it may be tried when nothing smaller is left to try."""
        return self.expected(shape) <= self.granted_bytes

    def observe(self, shape: StepShape, measured_bytes: int | None) -> None:
        """Learn from a step that has run, if it is known what it took."""
        self.widening = 1.0 + (self.widening - 1.0) * _KEPT
        expected = self.expected(shape)
        if measured_bytes is not None and expected and measured_bytes > expected * self.widening:
            self._widen(_ABOVE_SURPRISE * measured_bytes / expected)

    def observe_exhaustion(self) -> None:
        """Learn from a step that could not be run."""
        self._widen(self.widening * _AFTER_EXHAUSTION)

    def reset(self) -> None:
        """Forget all surprises."""
        self.widening = 1.0

    def _widen(self, factor: float) -> None:
        self.widening = min(WIDEST, max(self.widening, factor))
