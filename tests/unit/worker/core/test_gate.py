"""The gate: predictions against room, and how it learns from wrong predictions and forgets them."""

from __future__ import annotations

import pytest

from penstock.memory.cost import GroupCost, KvCost, Measured, fit
from penstock.worker.core.gate import MAX_FACTOR, StepGate, StepShape

MIB = 1 << 20
SMALL, LARGE = StepShape(1, 1, 1, 1), StepShape(512, 1, 512, 1)


def make_gate(granted: int = 100 * MIB) -> StepGate:
    points = [Measured(1, 1, 1, 1, MIB), Measured(512, 1, 512, 1, 80 * MIB)]
    return StepGate(fit(points, KvCost((GroupCost(1 << 14),), 16)), granted)


def test_a_step_is_admitted_up_to_the_room_there_is() -> None:
    gate = make_gate()
    assert gate.admits(LARGE) and not gate.rejected
    gate.room_bytes = 80 * MIB - 1
    assert not gate.admits(LARGE) and gate.rejected
    assert gate.admits(SMALL)


def test_running_out_of_memory_widens_within_bounds_and_decays() -> None:
    gate = make_gate()
    for _ in range(20):
        gate.observe_oom()
    assert gate.safety_factor == MAX_FACTOR
    assert not gate.admits(LARGE)
    for _ in range(300):
        gate.observe(SMALL, 0)
    assert gate.safety_factor == pytest.approx(1.0, abs=0.01)
    assert gate.admits(LARGE)


def test_a_step_that_took_more_than_predicted_widens_to_it() -> None:
    gate = make_gate()
    gate.observe(LARGE, 88 * MIB)
    assert gate.predicted(LARGE) >= 88 * MIB
    gate.reset()
    assert gate.predicted(LARGE) == gate.expected(LARGE)


def test_what_was_measured_as_predicted_changes_nothing() -> None:
    gate = make_gate()
    gate.observe(LARGE, gate.expected(LARGE))
    assert gate.safety_factor == 1.0


def test_the_last_word_on_the_smallest_step_ignores_the_safety_factor() -> None:
    gate = make_gate(granted=80 * MIB)
    gate.observe_oom()
    assert not gate.admits(LARGE)
    assert gate.can_ever_run(LARGE)
    gate.granted_bytes = 79 * MIB
    assert not gate.can_ever_run(LARGE)


def test_shapes_add_up_but_for_the_longest_context() -> None:
    shape = StepShape().plus(4, 100, 1).plus(2, 50, 2).plus(3, 60, 3, 3)
    assert shape == StepShape(tokens=9, sequences=5, context=100, logit_rows=6)
