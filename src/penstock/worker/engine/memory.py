"""The memory that steps are computed in: what is granted, what is left, what each step took."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.worker.meter import PrivateBytes
from penstock.worker.models.kernels.cpu_memory import MANY_ROWS
from penstock.worker.scheduling.gate import StepGate

if TYPE_CHECKING:
    from penstock.worker.caps import Cap
    from penstock.worker.kv.arena import Arena
    from penstock.worker.meter import Meter
    from penstock.worker.profile import Profile
    from penstock.worker.scheduling.plan import Plan

log = logging.getLogger(__name__)

_STEPS_BETWEEN_READINGS = 256
_WORTH_A_TRY_BYTES = 1 << 20


class StepMemory:
    """Keeps the gate's room true to the meter, and the cap true to the grant.

    Allocators keep what a step has freed for the next one. So what is held tells what steps take
    only after that has been dropped: then it is read, and then a step is learned from.
    """

    def __init__(self, profile: Profile, arena: Arena, meter: Meter, cap: Cap) -> None:
        self._arena = arena
        self._meter = meter
        self._cap = cap
        self._in_ram = arena.in_ram
        self._base = profile.held_bytes
        # What requests take on the host is on the meter only where that reads RAM. So is what
        # libraries take for themselves, which a profile that was taken over has not seen yet.
        kept_bytes = profile.kept_bytes if profile.proven else 0
        self._other_bytes = profile.host_bytes + kept_bytes if self._in_ram else 0
        self._private = PrivateBytes()
        self.gate = StepGate(profile.cost, profile.step_bytes)
        self._excused = 0  # bytes by which the cap has moved at that time
        self._taken = 0  # beyond the base, when caches were last dropped
        self._fresh = True  # no step has run since then
        self._steps = 0  # since then
        self._surprised = False  # since then: steps hold more than was predicted
        self.surprises = 0  # how often that was so
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
        self.gate.pinched = False

    def relieve(self) -> int:
        """Give back what allocators keep; how many bytes that was."""
        before = self._meter.held()
        self._meter.drop_caches()
        held = self._meter.held()
        self._taken = self._beyond_base(held)
        self._fresh, self._steps, self._surprised = True, 0, False
        self.predicted_bytes = self.measured_bytes = 0
        self._excused = self._cap.excuse(self._taken)
        return max(0, before - held)

    def learn_from_exhaustion(self) -> bool:
        """A step ran out of memory; whether it may be tried again as it was, because holes of the
        heap have been counted against it."""
        self.relieve()
        if self._excused >= _WORTH_A_TRY_BYTES:
            return True
        self.gate.observe_exhaustion()
        return False

    def begin(self, plan: Plan) -> None:
        """A step is about to run."""
        self.predicted_bytes = max(self.predicted_bytes, self.gate.predicted(plan.shape))
        if self._in_ram and plan.tokens >= MANY_ROWS:
            # What many small steps have left in the heap would come on top of it.
            self._meter.drop_caches()
        self._meter.mark()

    def end(self, plan: Plan) -> None:
        """It has run: learn from what it took."""
        beyond = self._beyond_base(self._meter.peak())
        took = beyond - self._other_bytes
        self.measured_bytes = max(self.measured_bytes, took)
        shape, fresh = plan.shape, self._fresh
        if self.measured_bytes > self.predicted_bytes and not self._surprised:
            self._surprised = True
            self.surprises += 1
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

    def private_bytes(self) -> int:
        """Of this process, now."""
        return self._private.read()

    def _beyond_base(self, held: int) -> int:
        kv = self._arena.committed_bytes if self._in_ram else 0
        return max(0, held - self._base - kv)
