"""The memory that steps are computed in: what is granted, what is left, what each step took."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.worker.core.gate import StepGate, StepShape

if TYPE_CHECKING:
    from typing import Protocol

    from penstock.worker.core.profile import Profile

    class Planned(Protocol):
        """The work of one step."""

        @property
        def shape(self) -> StepShape: ...

    class Meter(Protocol):
        """The memory in which steps are computed, KV aside."""

        includes_host: bool

        def held(self) -> int: ...

        def begin_step(self, rows: int) -> None: ...

        def peak(self) -> int: ...

        def drop_caches(self) -> None: ...

    class Cap(Protocol):
        """The limit that it is held to."""

        def move(self, kv_bytes: int, step_bytes: int) -> None: ...

        def allow_fragmentation(self, taken_bytes: int) -> int: ...


log = logging.getLogger(__name__)

_STEPS_BETWEEN_READINGS = 256
_WORTH_A_TRY_BYTES = 1 << 20


class StepMemory:
    """Keeps the gate's room true to the meter, and the cap true to the grant.

    Allocators keep what a step has freed for the next one. So what is held tells what steps take
    only after that has been dropped: then it is read, and then a step is learned from.
    """

    def __init__(self, profile: Profile, meter: Meter, cap: Cap) -> None:
        self._meter = meter
        self._cap = cap
        self._base = profile.held_bytes
        # What requests take on the host is not on every meter. Nor is what libraries take for
        # themselves, which a profile that was taken over has not seen yet.
        kept_bytes = profile.kept_bytes if profile.proven else 0
        self._other_bytes = profile.host_bytes + kept_bytes if meter.includes_host else 0
        self.gate = StepGate(profile.cost, profile.step_bytes)
        self._allowed = 0  # bytes by which the cap has moved at that time
        self._taken = 0  # beyond the base, when caches were last dropped
        self._fresh = True  # no step has run since then
        self._shape = StepShape()  # of the latest step
        self._steps = 0  # since then
        self._underpredicted = False  # since then: steps hold more than was predicted
        self.underpredicted_steps = 0  # how often that was so
        self.predicted_bytes = 0  # the largest step since then
        self.measured_bytes = 0  # the most that was held since then for steps alone

    def grant(self, kv_bytes: int, step_bytes: int) -> None:
        """Move the cap with what may be held."""
        self.gate.granted_bytes = step_bytes
        self._cap.move(kv_bytes, step_bytes)

    def read_room(self) -> None:
        """Tell the gate what is left for a step now."""
        if self._steps >= _STEPS_BETWEEN_READINGS:
            self.relieve()
        self.gate.room_bytes = self.gate.granted_bytes - max(self._taken, self._other_bytes)
        self.gate.rejected = False

    def relieve(self) -> int:
        """Give back what allocators keep; how many bytes that was."""
        before = self._meter.held()
        self._meter.drop_caches()
        held = self._meter.held()
        self._taken = self._beyond_base(held)
        self._fresh, self._steps, self._underpredicted = True, 0, False
        self.predicted_bytes = self.measured_bytes = 0
        self._allowed = self._cap.allow_fragmentation(self._taken)
        return max(0, before - held)

    def learn_from_oom(self) -> bool:
        """A step ran out of memory. True when it may be repeated unchanged: fragmentation of the
        heap had been counted against it, and that allowance is used up now."""
        self.relieve()
        if self._allowed >= _WORTH_A_TRY_BYTES:
            return True
        self.gate.observe_oom()
        return False

    def begin(self, plan: Planned) -> None:
        """A step is about to run."""
        self._shape = plan.shape
        self.predicted_bytes = max(self.predicted_bytes, self.gate.predicted(self._shape))
        self._meter.begin_step(self._shape.tokens)

    def end(self) -> None:
        """It has run: learn from what it took."""
        beyond = self._beyond_base(self._meter.peak())
        took = beyond - self._other_bytes
        self.measured_bytes = max(self.measured_bytes, took)
        shape, fresh = self._shape, self._fresh
        if self.measured_bytes > self.predicted_bytes and not self._underpredicted:
            self._underpredicted = True
            self.underpredicted_steps += 1
            log.info(
                "steps hold %d bytes, %d were expected; the latest: %s, %d steps after caches "
                "were dropped",
                self.measured_bytes,
                self.predicted_bytes,
                shape,
                self._steps,
            )
        self._fresh = False
        self._steps += 1
        self.gate.observe(shape, took if fresh else None)
        if beyond > self.gate.granted_bytes:
            self.relieve()  # holes that steps of many shapes have left
        log.debug(
            "step of %s: %d bytes predicted, %d measured",
            shape,
            self.predicted_bytes,
            self.measured_bytes,
        )

    def _beyond_base(self, held: int) -> int:
        return max(0, held - self._base)
