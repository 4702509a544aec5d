"""What a step is said to have taken, from readings of which every byte is known."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from penstock.memory.cost import GroupCost, KvCost, Measured, fit
from penstock.worker.backends.caps import NoCap
from penstock.worker.core.plan import Plan, Slice, StepLimits
from penstock.worker.core.profile import Profile
from penstock.worker.core.step_memory import StepMemory

MIB = 1 << 20
BASE, KV, HOST = 100 * MIB, 50 * MIB, 7 * MIB
STEP = 20 * MIB


@dataclass
class Readings:
    """An allocator that keeps what steps have freed until it is told to drop it."""

    held_bytes: int
    includes_host: bool
    peak_bytes: int = 0
    noise_bytes: int = 0
    floor_bytes: int = 0

    def held(self) -> int:
        return self.held_bytes

    def begin_step(self, rows: int) -> None:
        self.mark()

    def mark(self) -> None:
        self.peak_bytes = self.held_bytes

    def peak(self) -> int:
        return self.peak_bytes

    def drop_caches(self) -> None:
        pass


def memory(*, in_ram: bool) -> tuple[StepMemory, Readings]:
    cost = fit([Measured(64, 1, 64, 1, STEP)], KvCost((GroupCost(1 << 14),), 16))
    limits = StepLimits(64, 4, 16, 8)
    profile = Profile(cost, limits, STEP + HOST, HOST, KV, BASE)
    readings = Readings(BASE, includes_host=in_ram)
    return StepMemory(profile, readings, NoCap()), readings


def plan() -> Plan:
    return Plan(chunks=[Slice(0, 0, [0] * 64, (), 1, samples=True)])


@pytest.mark.parametrize("in_ram", [True, False])
def test_what_requests_take_on_the_host_is_no_part_of_a_step(in_ram: bool) -> None:
    steps, readings = memory(in_ram=in_ram)
    steps.begin(plan())
    # The meter of a GPU sees nothing of the host, so there all of it is the step's.
    readings.peak_bytes = readings.held_bytes + STEP - MIB + (HOST if in_ram else 0)
    steps.end()
    assert steps.measured_bytes == STEP - MIB
    assert steps.predicted_bytes >= STEP
    assert steps.gate.safety_factor == 1.0


def test_on_a_gpu_a_step_that_took_more_than_predicted_widens_the_gate() -> None:
    steps, readings = memory(in_ram=False)
    steps.begin(plan())
    readings.peak_bytes = readings.held_bytes + STEP + 2 * MIB
    steps.end()
    assert steps.gate.safety_factor > 1.0
