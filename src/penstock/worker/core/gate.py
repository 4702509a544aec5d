"""The check before every step: its predicted bytes against what steps are granted. No torch.

A prediction is the cost model's envelope times a safety factor, which rises when the envelope was
found wrong: a step ran out of memory or took more than was predicted. The factor is bounded, decays
with every step and can be reset, so that a bad moment does not become a slow model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.memory.cost import CostModel

MAX_FACTOR = 2.0
_AFTER_OOM = 1.25  # by which a failed step multiplies the safety factor
_ABOVE_MEASURED = 1.05  # how far above the step that took more than was predicted
_KEPT = 0.98  # of what is above 1, a step later


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


class Gate(Protocol):
    """Whether a step of a shape has the memory it needs."""

    def admits(self, shape: StepShape) -> bool: ...

    def fits(self, shape: StepShape) -> bool: ...


class StepGate:
    """Judges shapes; `room_bytes` is set from the latest reading before each step."""

    def __init__(self, cost: CostModel, granted_bytes: int) -> None:
        self._cost = cost
        self.granted_bytes = granted_bytes
        self.room_bytes = granted_bytes
        self.safety_factor = 1.0
        self.rejected = False  # a shape was turned away since this was last cleared

    def expected(self, shape: StepShape) -> int:
        """The measured envelope itself."""
        return self._cost.step(shape.tokens, shape.sequences, shape.context, shape.logit_rows)

    def predicted(self, shape: StepShape) -> int:
        """The envelope times the safety factor."""
        return int(self.expected(shape) * self.safety_factor)

    def admits(self, shape: StepShape) -> bool:
        """Whether such a step may be planned."""
        fits = self.fits(shape)
        self.rejected |= not fits
        return fits

    def fits(self, shape: StepShape) -> bool:
        """The same, where a step goes on without what does not fit."""
        return self.predicted(shape) <= self.room_bytes

    def can_ever_run(self, shape: StepShape) -> bool:
        """Whether it may be tried when nothing smaller is left to try."""
        return self.expected(shape) <= self.granted_bytes

    def observe(self, shape: StepShape, measured_bytes: int | None) -> None:
        """Learn from a step that has run, if it is known what it took."""
        self.safety_factor = 1.0 + (self.safety_factor - 1.0) * _KEPT
        expected = self.expected(shape)
        if (
            measured_bytes is not None
            and expected
            and measured_bytes > expected * self.safety_factor
        ):
            self._raise(_ABOVE_MEASURED * measured_bytes / expected)

    def observe_oom(self) -> None:
        """Learn from a step that could not be run."""
        self._raise(self.safety_factor * _AFTER_OOM)

    def reset(self) -> None:
        """Forget all wrong predictions."""
        self.safety_factor = 1.0

    def _raise(self, factor: float) -> None:
        self.safety_factor = min(MAX_FACTOR, max(self.safety_factor, factor))


def largest(least: int, most: int, admits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that is admitted; `least` if none above it is."""
    if most <= least or admits(most):
        return most
    while most - least > 1:  # nothing from `most` on is admitted
        middle = (least + most) // 2
        least, most = (middle, most) if admits(middle) else (least, middle)
    return least
