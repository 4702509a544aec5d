"""The memory that steps are computed in: what is granted, what is left, what each step took."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.worker.meter import PrivateBytes
from penstock.worker.scheduling.gate import StepGate

if TYPE_CHECKING:
    from penstock.worker.caps import Cap
    from penstock.worker.kv.arena import Arena
    from penstock.worker.meter import Meter
    from penstock.worker.profile import Profile
    from penstock.worker.scheduling.scheduler import Plan

log = logging.getLogger(__name__)


class StepMemory:
    """Keeps the gate's room true to the meter, and the cap true to the grant."""

    def __init__(self, profile: Profile, arena: Arena, meter: Meter, cap: Cap) -> None:
        self._arena = arena
        self._meter = meter
        self._cap = cap
        self._base = profile.held_bytes
        self._host_bytes = profile.host_bytes
        self._private = PrivateBytes()
        self.gate = StepGate(profile.cost, profile.step_bytes)
        self.predicted_bytes = 0
        self.measured_bytes = 0

    def grant(self, kv_bytes: int, step_bytes: int) -> None:
        """Move the cap with what may be held."""
        self.gate.granted_bytes = step_bytes
        self._cap.move(kv_bytes, step_bytes)

    def read_room(self) -> None:
        """Tell the gate what is left for a step now."""
        taken = max(self._beyond_base(self._meter.held()), self._host_bytes)
        self.gate.room_bytes = self.gate.granted_bytes - taken
        self.gate.pinched = False

    def relieve(self) -> int:
        """Give back what allocators keep; how many bytes that was."""
        before = self._meter.held()
        self._meter.drop_caches()
        return max(0, before - self._meter.held())

    def begin(self, plan: Plan) -> None:
        """A step is about to run."""
        self.predicted_bytes = self.gate.predicted(plan.shape)
        self._meter.mark()

    def end(self, plan: Plan) -> None:
        """It has run: learn from what it took."""
        self.measured_bytes = self._beyond_base(self._meter.peak())
        shape = plan.shape
        self.gate.observe(shape, self.measured_bytes - self._host_bytes)
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
        kv = self._arena.committed_bytes if self._arena.in_ram else 0
        return max(0, held - self._base - kv)
