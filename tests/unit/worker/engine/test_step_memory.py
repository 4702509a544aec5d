"""What a step is said to have taken, from readings of which every byte is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import pytest

from penstock.memory.cost import Measured, fit
from penstock.wire import Sampling, Submit
from penstock.worker.caps import NoCap
from penstock.worker.engine.memory import StepMemory
from penstock.worker.profile import Profile
from penstock.worker.scheduling.plan import Plan, Slice, StepLimits
from penstock.worker.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from penstock.worker.kv.arena import Arena

MIB = 1 << 20
BASE, KV, HOST = 100 * MIB, 50 * MIB, 7 * MIB
STEP = 20 * MIB


@dataclass
class Readings:
    """An allocator that keeps what steps have freed until it is told to drop it."""

    held_bytes: int
    peak_bytes: int = 0

    def held(self) -> int:
        return self.held_bytes

    def mark(self) -> None:
        self.peak_bytes = self.held_bytes

    def peak(self) -> int:
        return self.peak_bytes

    def drop_caches(self) -> None:
        pass


@dataclass
class Placed:
    in_ram: bool
    committed_bytes: int = KV


def memory(*, in_ram: bool) -> tuple[StepMemory, Readings]:
    cost = fit([Measured(64, 1, 64, 1, STEP)], 1024, 16)
    limits = StepLimits(64, 4, 16, 8)
    profile = Profile(cost, limits, STEP + HOST, HOST, 100, KV, BASE)
    readings = Readings(BASE + KV if in_ram else BASE)
    arena = cast("Arena", Placed(in_ram))
    return StepMemory(profile, arena, readings, NoCap()), readings


def plan() -> Plan:
    sequence = Sequence(Submit(0, [0] * 64, 1, Sampling()), 0)
    return Plan(chunks=[Slice(sequence, 0, 64)])


@pytest.mark.parametrize("in_ram", [True, False])
def test_what_requests_take_on_the_host_is_no_part_of_a_step(in_ram: bool) -> None:
    steps, readings = memory(in_ram=in_ram)
    steps.begin(plan())
    # The meter of a GPU sees nothing of the host, so there all of it is the step's.
    readings.peak_bytes = readings.held_bytes + STEP - MIB + (HOST if in_ram else 0)
    steps.end(plan())
    assert steps.measured_bytes == STEP - MIB
    assert steps.predicted_bytes >= STEP
    assert steps.gate.widening == 1.0


def test_on_a_gpu_a_step_that_took_more_than_predicted_widens_the_gate() -> None:
    steps, readings = memory(in_ram=False)
    steps.begin(plan())
    readings.peak_bytes = readings.held_bytes + STEP + 2 * MIB
    steps.end(plan())
    assert steps.gate.widening > 1.0
