"""Counters of an engine: steps, their tokens and durations, prompt tokens found in the cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Figures:
    """What an engine has done."""

    steps: int = 0
    step_tokens: int = 0  # of the latest step
    step_s: float = 0.0
    host_s: float = 0.0  # of the latest step, in which the device had nothing to do
    device_s: float = 0.0
    prompt_tokens: int = 0  # of requests that have begun
    reused_tokens: int = 0  # of those, found computed

    def step_ran(self, tokens: int, step_s: float, forward_s: float) -> None:
        """One more."""
        self.steps += 1
        self.step_tokens = tokens
        self.step_s = step_s
        self.host_s = max(0.0, step_s - forward_s)
        self.device_s += forward_s
