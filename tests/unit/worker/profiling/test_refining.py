"""The rest of a profile: when it is measured, what ends it, and what comes of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from torch import nn

from penstock.testing.machine import LAYERS, MIB, Eye, Machine, make_context
from penstock.worker.models.verify import Kept
from penstock.worker.profiling import profile as profiles
from penstock.worker.profiling import refining
from penstock.worker.profiling import store as profile_store
from penstock.worker.profiling.images import ImageCost
from penstock.worker.profiling.refining import QUIET_S, Refinement

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.worker.core.backend import StepResult
    from penstock.worker.core.plan import Plan

GRANT = 128 * MIB


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class CallingMachine(Machine):
    """Has a module in its steps, as models have, and may be called in one."""

    crowded = False

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.called_at = -1  # the step in which a message arrives
        self._module = nn.Identity()

    def called(self) -> bool:
        return self.calls == self.called_at

    def compute(self, plan: Plan) -> StepResult:
        self.calls += 1
        self._module(0)
        return super().compute(plan)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(refining, "time", found)
    return found


class Serving:
    """A model that serves with a first profile."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, eye: Eye | None = None
    ) -> None:
        self.machine = CallingMachine()
        context = make_context(self.machine, GRANT, profile_dir=str(folder))
        images = ImageCost(eye, context.spec)  # type: ignore[arg-type]
        self.context = dataclasses.replace(context, images=images)
        warm_up = profiles._warm_up
        monkeypatch.setattr(profiles, "_warm_up", lambda context: 0 * warm_up(context) + 0.1)
        self.found = profiles.profile(self.context)
        assert self.found.provisional
        self.context.kv.set_limit(self.found.kv_bytes)
        self.machine.move(self.found.kv_bytes, self.found.step_bytes)
        self.refinement = Refinement(self.context, self.found, Kept(LAYERS, {}))
        self.before = len(self.machine.steps)
        self.folder = str(folder)

    def run(self, steps: int = 0) -> float | None:
        granted = self.found.kv_bytes, self.found.step_bytes
        return self.refinement.run(steps, granted, self.machine.called)

    @property
    def measured(self) -> int:
        """Steps that came to their end."""
        return len(self.machine.steps) - self.before

    def stored(self) -> profile_store.StoredProfile | None:
        return profile_store.load(self.folder, self.context.fingerprint)


def test_nothing_is_measured_before_it_has_been_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    serving = Serving(tmp_path, monkeypatch)
    assert serving.run() == QUIET_S
    clock.now += QUIET_S - 1
    assert serving.run() == 1.0
    clock.now += 1
    assert serving.run(steps=1) == QUIET_S  # a step has run meanwhile
    assert serving.measured == 0
    clock.now += QUIET_S
    assert serving.run(steps=1) == 0.0
    assert serving.measured == 1


def test_a_message_ends_a_step_which_is_measured_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    serving = Serving(tmp_path, monkeypatch)
    serving.run()
    clock.now += QUIET_S
    serving.machine.called_at = serving.machine.calls + 1
    free = serving.context.kv.free_bytes
    assert serving.run() == 0.0
    assert serving.measured == 0
    assert serving.context.kv.free_bytes == free
    assert serving.machine.limit == serving.found.kv_bytes + serving.found.step_bytes
    serving.run()
    assert serving.measured == 1


def test_what_comes_of_it_is_the_profile_of_a_load_that_measures_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    serving = Serving(tmp_path, monkeypatch)
    serving.run()
    clock.now += QUIET_S
    while serving.run() is not None:
        assert serving.stored() is None
        assert serving.context.kv.limit_bytes == serving.found.kv_bytes
    stored = serving.stored()
    assert stored is not None
    assert not stored.proven
    assert not stored.provisional
    whole = profiles.profile(make_context(Machine(), GRANT))
    assert stored.step_tokens == whole.limits.tokens
    assert stored.cost == whole.cost
    assert serving.context.kv.limit_bytes == serving.found.kv_bytes
    assert serving.run() is None
    later = profiles.profile(make_context(Machine(), GRANT, profile_dir=serving.folder))
    assert later.limits.tokens == 1024
    assert not later.provisional


def test_what_images_take_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    eye = Eye(4 * MIB)
    monkeypatch.setattr("penstock.worker.profiling.images.IMAGE_FILE_COPIES", 0)
    serving = Serving(tmp_path, monkeypatch, eye)
    serving.run()
    clock.now += QUIET_S
    while serving.run() is not None:
        pass
    stored = serving.stored()
    assert stored is not None
    assert (stored.image_pixels, stored.stage_bytes) == (Eye.max_pixels, 4 * MIB)
    assert stored.stage_s == Eye.encode_s
    assert eye.measured == 1


def test_steps_are_halved_where_there_is_no_room_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    serving = Serving(tmp_path, monkeypatch)
    serving.run()
    clock.now += QUIET_S
    granted = 0, 40 * MIB  # less than a step of 1,024 tokens takes
    while serving.refinement.run(0, granted, serving.machine.called) is not None:
        pass
    stored = serving.stored()
    assert stored is not None
    assert stored.step_tokens == 512


def test_it_ends_where_there_is_no_room_for_more_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    serving = Serving(tmp_path, monkeypatch)
    serving.run()
    clock.now += QUIET_S
    while serving.refinement.run(0, (0, MIB), serving.machine.called) is not None:
        pass
    assert serving.stored() is None
    assert serving.run() is None
