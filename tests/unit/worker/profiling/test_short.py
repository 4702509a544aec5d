"""First profiles: when there is one, what steps it allows, and that it is never below the truth."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from penstock.testing.machine import LAYERS, MIB, Eye, Machine, make_context
from penstock.worker.core.gate import StepShape
from penstock.worker.models.verify import Kept
from penstock.worker.profiling import profile as profiles
from penstock.worker.profiling import short
from penstock.worker.profiling import store as profile_store
from penstock.worker.profiling.images import ImageCost

if TYPE_CHECKING:
    from pathlib import Path


def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which 64 tokens take 0.1 s."""
    warm_up = profiles._warm_up
    monkeypatch.setattr(profiles, "_warm_up", lambda context: 0 * warm_up(context) + 0.1)


@pytest.mark.parametrize(("step_s", "tokens"), [(0.001, None), (0.02, 512), (0.1, 128), (2.0, 64)])
def test_steps_are_as_large_as_is_quick(tmp_path: Path, step_s: float, tokens: int | None) -> None:
    context = make_context(Machine(), 128 * MIB, profile_dir=str(tmp_path))
    found = short.limits_of(context, step_s)
    assert (found and found.tokens) == tokens


def test_without_a_place_to_keep_the_rest_all_is_measured_at_once() -> None:
    assert short.limits_of(make_context(Machine(), 128 * MIB), 1.0) is None


def test_a_small_model_is_measured_at_once_however_slow_the_moment(tmp_path: Path) -> None:
    context = make_context(Machine(), 128 * MIB, profile_dir=str(tmp_path))
    small = dataclasses.replace(context, weight_bytes=short.SMALL_BYTES - 1)
    assert short.limits_of(small, 9.0) is None


def test_every_step_is_said_to_cost_what_the_largest_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch)
    machine = Machine()
    context = make_context(machine, 128 * MIB, profile_dir=str(tmp_path))
    found = profiles.profile(context)
    assert found.provisional
    assert found.limits.tokens == 128
    assert len(machine.steps) < 12
    largest = max(machine.steps, key=machine.cost)
    for shape in (StepShape(1, 1, 1, 1), largest):
        cost = found.cost.step(*dataclasses.astuple(shape))
        assert machine.cost(largest) <= cost
        assert cost + found.host_bytes <= found.step_bytes
    assert found.kv_bytes + found.step_bytes <= 128 * MIB


def test_a_first_profile_serves_again_and_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch)
    context = make_context(Machine(), 128 * MIB, profile_dir=str(tmp_path))
    found = profiles.profile(context)
    profiles.remember(context, found, Kept(LAYERS, {}))
    again = profiles.profile(make_context(Machine(), 128 * MIB, profile_dir=str(tmp_path)))
    assert again.provisional
    assert again.proven
    assert again.limits == found.limits
    stored = profile_store.load(str(tmp_path), context.fingerprint)
    assert stored is not None
    assert stored.provisional


def test_the_largest_image_is_measured_in_a_first_profile_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch)
    grant, stage_bytes = 192 * MIB, 48 * MIB
    eyes = [Eye(stage_bytes), Eye(1)]
    founds = []
    for eye in eyes:
        context = make_context(
            *(Machine(), grant),
            profile_dir=str(tmp_path),
            image_bytes=8 * MIB,
            image_file_bytes=4 * MIB,
        )
        images = ImageCost(eye, context.spec)  # type: ignore[arg-type]
        context = dataclasses.replace(context, images=images)
        found = profiles.profile(context)
        profiles.remember(context, found, Kept(LAYERS, {}))
        founds.append(found)
        assert found.provisional
        # A step of so few tokens takes less than that.
        assert found.step_bytes >= stage_bytes + found.host_bytes
        assert found.host_bytes >= images.host_bytes > 8 * MIB
        assert found.kv_bytes + found.step_bytes <= grant
        assert (images.pixels, images.stage_bytes) == (Eye.max_pixels, stage_bytes)
    assert [eye.measured for eye in eyes] == [1, 0]  # the second load takes it over
    assert founds[1].proven


def test_where_not_even_small_steps_fit_the_whole_way_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch)
    context = make_context(Machine(), 26 * MIB, profile_dir=str(tmp_path))
    found = profiles.profile(context)
    assert not found.provisional
