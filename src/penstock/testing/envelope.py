"""What steps were predicted to take beside what they took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step."""

    predicted_bytes: int
    measured_bytes: int
    shape: str


def describe(steps: list[MeasuredStep]) -> str:
    """How predictions compare with what was measured, for a report."""
    if not steps:
        return "no steps"
    steps = sorted(steps, key=lambda step: step.measured_bytes)
    every = [step.predicted_bytes / max(1, step.measured_bytes) for step in steps]
    ratios, top = sorted(every), sorted(every[-max(1, len(every) // 10) :])
    places = (0.0, 0.1, 0.5, 0.9, 1.0)
    told = [
        " ".join(f"{some[int(place * (len(some) - 1))]:.2f}" for place in places)
        for some in (ratios, top)
    ]
    return (
        f"{len(steps)} steps of up to {steps[-1].measured_bytes} bytes; predicted / measured at "
        f"the minimum, 10 %, median, 90 %, maximum: {told[0]}; of the largest tenth: {told[1]}"
    )
