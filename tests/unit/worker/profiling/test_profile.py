"""Profiles on a machine of which every byte is known: sizing, halving, shrinking, storing."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from penstock.errors import ModelTooLarge
from penstock.testing.machine import (
    BLOCK_TOKENS,
    LAYERS,
    MIB,
    TOKEN_BYTES,
    Machine,
    make_context,
)
from penstock.worker.core.drafts.lookup import INDEX_BYTES
from penstock.worker.core.plan import StepLimits
from penstock.worker.models.verify import Kept
from penstock.worker.profiling.profile import profile, remember
from penstock.worker.profiling.sizing import HOST_BYTES, HOST_BYTES_PER_TOKEN, MIN_STEP_TOKENS
from penstock.worker.profiling.timing import with_times

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.worker.core.profile import Profile


def test_kv_gets_all_that_the_largest_step_leaves() -> None:
    machine = Machine()
    grant = 256 * MIB
    found = profile(make_context(machine, grant))
    assert found.kv_bytes + found.step_bytes <= grant
    largest = max(machine.cost(shape) for shape in machine.steps)
    assert found.kv_bytes >= 0.95 * (grant - largest) - HOST_BYTES - MIB
    assert found.limits.tokens == 1024
    assert found.held_bytes == 1000 * MIB
    assert machine.memory.committed_bytes <= MIB, "what validation committed was not returned"
    host = found.kv_bytes // TOKEN_BYTES * HOST_BYTES_PER_TOKEN + HOST_BYTES
    assert found.step_bytes >= largest and found.host_bytes <= host


def test_with_drafts_their_rows_are_tried_and_their_index_is_booked() -> None:
    plain, drafting = Machine(), Machine()
    without = profile(make_context(plain, 256 * MIB))
    found = profile(make_context(drafting, 256 * MIB, drafts=15))
    assert found.limits.logit_rows == without.limits.logit_rows == 128
    # Beside a decode of each sequence the plain one never has more rows of logits than sequences,
    # but for scored prompts.
    full = [s for s in drafting.steps if s.tokens == s.logit_rows == 16 * s.sequences]
    assert {shape.sequences for shape in full} == {1, 3, 7}
    assert not any(shape.logit_rows > shape.sequences == 7 for shape in plain.steps)
    assert max(shape.context for shape in full) == max(shape.context for shape in plain.steps)
    booked = found.host_bytes - HOST_BYTES
    assert booked == found.host_tokens * (HOST_BYTES_PER_TOKEN + INDEX_BYTES)
    assert without.host_bytes - HOST_BYTES == without.host_tokens * HOST_BYTES_PER_TOKEN


def test_few_sequences_leave_rows_for_the_drafts_of_one() -> None:
    limits = StepLimits(1024, 2, BLOCK_TOKENS, StepLimits.logit_rows_for(2, 15))
    assert limits.logit_rows == 18
    assert StepLimits.logit_rows_for(2, 0) == 4
    assert StepLimits.logit_rows_for(64, 15) == 128
    assert limits.within(512, 15) == StepLimits(512, 2, BLOCK_TOKENS, 18)
    assert limits.within(3, 0) == StepLimits(3, 1, BLOCK_TOKENS, 2)


def test_times_of_rows_are_measured_once_and_kept(tmp_path: Path) -> None:
    def loaded(drafts: int) -> tuple[Profile, Machine]:
        machine = Machine()
        context = make_context(machine, 256 * MIB, drafts=drafts, profile_dir=str(tmp_path))
        found = profile(context)
        machine.steps.clear()
        found = with_times(context, found)
        remember(context, found, Kept({}, {}))
        return found, machine

    first, machine = loaded(15)
    assert [rows for rows, _ in first.times] == [1, 2, 4, 8, 16]
    assert all(seconds > 0 for _, seconds in first.times)
    assert {shape.tokens for shape in machine.steps} == {1, 2, 4, 8, 16}
    assert all(shape.logit_rows == shape.tokens for shape in machine.steps)
    again, machine = loaded(15)
    assert again.times == first.times
    assert not machine.steps
    off, machine = loaded(0)
    assert off.times == () and not machine.steps


def test_the_envelope_covers_steps_that_were_not_tried() -> None:
    machine = Machine()
    found = profile(make_context(machine, 128 * MIB))
    for shape in machine.steps:
        step = (shape.tokens, shape.sequences, shape.context, shape.logit_rows)
        assert found.cost.step(*step) >= machine.cost(shape)
    assert found.cost.step(300, 20, 3000, 40) >= MIB + 300 * machine.token_bytes


def test_the_step_is_halved_before_the_model_is_refused() -> None:
    machine = Machine(token_bytes=200_000)  # a step of 1024 tokens takes 196 MiB
    found = profile(make_context(machine, 48 * MIB))
    assert MIN_STEP_TOKENS <= found.limits.tokens <= 128
    assert found.limits.sequences < found.limits.tokens
    assert found.limits.logit_rows > found.limits.sequences
    assert found.kv_bytes >= 1024 * TOKEN_BYTES


def test_a_model_that_leaves_little_room_loads_all_the_same() -> None:
    machine = Machine(token_bytes=200_000)
    found = profile(make_context(machine, 26 * MIB))
    assert found.limits.tokens == MIN_STEP_TOKENS
    assert found.kv_bytes >= 2 * BLOCK_TOKENS * TOKEN_BYTES


def test_what_cannot_fit_is_refused_with_every_knob_and_its_value() -> None:
    machine = Machine(token_bytes=MIB)
    with pytest.raises(ModelTooLarge) as refused:
        profile(make_context(machine, 32 * MIB, threads=3))
    message = refused.value.message
    for knob in (
        f"memory.limit leaves this model = {32 * MIB} bytes",
        "models.step_tokens = 1024 (tried down to 64)",
        "models.step_sequences = 64 (tried down to 32)",
        "models.max_context = none (window 4096)",
        "models.kv_tokens = auto",
        "models.dtype = auto (in force: float32)",
        "models.kv_dtype = auto (in force: float32)",
        "models.threads = 3",
    ):
        assert knob in message
    assert refused.value.numbers is not None
    assert refused.value.numbers["limit_bytes"] == 32 * MIB


def test_a_validation_that_fails_once_is_tried_again_as_it_is() -> None:
    whole = profile(make_context(Machine(), 128 * MIB))
    machine = Machine()
    machine.failures_to_come = 1
    assert profile(make_context(machine, 128 * MIB)) == whole


@pytest.mark.parametrize("failures", [1, 3])
def test_a_failed_validation_shrinks_the_arena_by_a_twentieth(failures: int) -> None:
    whole = profile(make_context(Machine(), 128 * MIB))
    machine = Machine()
    machine.failures_to_come = 1 + failures
    found = profile(make_context(machine, 128 * MIB))
    share = found.kv_bytes / whole.kv_bytes
    assert 0.95**failures - 0.05 < share <= 0.95**failures
    # What KV lost the step has: trying the same again would end the same.
    assert found.step_bytes - found.host_bytes > whole.step_bytes - whole.host_bytes
    assert found.kv_bytes + found.step_bytes <= 128 * MIB


def test_a_step_that_needs_more_than_was_measured_finds_it_after_shrinking() -> None:
    """A step beside a full arena takes 14 MiB more here than it did when it was measured."""
    machine = Machine()
    machine.more_beside_kv = 14 * MIB
    found = profile(make_context(machine, 128 * MIB))
    assert found.step_bytes >= max(map(machine.cost, machine.steps)) + 14 * MIB


def test_validation_that_keeps_failing_ends_in_the_diagnostic() -> None:
    machine = Machine()
    machine.failures_to_come = 5
    with pytest.raises(ModelTooLarge, match="validation failed after 3 retries"):
        profile(make_context(machine, 128 * MIB))


def test_a_size_of_the_users_own_is_taken_as_it_is_and_validated() -> None:
    machine = Machine()
    found = profile(make_context(machine, 128 * MIB, kv_tokens=4000))
    assert found.kv_bytes == 32 * MIB  # 251 blocks in whole extents
    failing = Machine()
    failing.failures_to_come = 2
    with pytest.raises(ModelTooLarge, match=r"models\.kv_tokens = 4000"):
        profile(make_context(failing, 128 * MIB, kv_tokens=4000))


def load(machine: Machine, memory_bytes: int, directory: Path) -> Profile:
    """A load that comes to its end."""
    context = make_context(machine, memory_bytes, profile_dir=str(directory))
    found = profile(context)
    remember(context, found, Kept(LAYERS, {}))
    return found


def test_a_profile_that_was_proven_is_taken_over(tmp_path: Path) -> None:
    first, second, third = Machine(), Machine(), Machine()
    first.kept_bytes = 3 * MIB
    one = load(first, 128 * MIB, tmp_path)
    assert one.kept_bytes == 3 * MIB
    two = load(second, 128 * MIB, tmp_path)
    assert two.proven and not second.steps
    assert (two.cost, two.limits) == (one.cost, one.limits)
    # What libraries will take for themselves is kept free, at the cost of KV.
    assert two.step_bytes - two.host_bytes == one.step_bytes - one.host_bytes + 3 * MIB
    assert two.kv_bytes + two.step_bytes <= 128 * MIB
    assert second.limit == two.kv_bytes + two.step_bytes, "the cap is in place"
    more = load(third, 160 * MIB, tmp_path)
    assert more.proven and more.kv_bytes > two.kv_bytes
    less = load(third, 110 * MIB, tmp_path)
    assert less.proven and less.kv_bytes < two.kv_bytes and not third.steps


def test_an_unproven_profile_is_validated(tmp_path: Path) -> None:
    first, second = Machine(), Machine()
    first.failures_to_come = 2  # the arena has to shrink
    one = load(first, 128 * MIB, tmp_path)
    two = load(second, 128 * MIB, tmp_path)
    assert one.shrunk and not two.shrunk and not two.proven
    assert two.cost == one.cost
    assert 1 < len(second.steps) < len(first.steps) / 2


def test_an_explicit_size_of_the_kv_is_always_tried(tmp_path: Path) -> None:
    first, second = Machine(), Machine()
    load(first, 128 * MIB, tmp_path)
    found = profile(make_context(second, 128 * MIB, profile_dir=str(tmp_path), kv_tokens=2000))
    assert not found.proven and len(second.steps) > 1


def test_a_stored_profile_that_does_not_hold_is_measured_anew(tmp_path: Path) -> None:
    first, second = Machine(), Machine()
    first.failures_to_come = 2  # so that it is not proven
    one = load(first, 128 * MIB, tmp_path)
    second.failures_to_come = 5
    two = load(second, 128 * MIB, tmp_path)
    assert two.limits == one.limits and not two.proven
    assert len(second.steps) > len(first.steps)


def test_a_little_less_memory_is_no_reason_to_measure_again(tmp_path: Path) -> None:
    first, second = Machine(), Machine()
    one = load(first, 128 * MIB, tmp_path)
    two = load(second, 120 * MIB, tmp_path)
    assert two.cost == one.cost and two.kv_bytes < one.kv_bytes
    assert len(second.steps) < len(first.steps) / 2


@pytest.mark.parametrize(
    "spoil",
    ["much less memory", "longer contexts", "another fingerprint", "a broken file"],
)
def test_a_stored_profile_that_does_not_apply_is_measured_anew(tmp_path: Path, spoil: str) -> None:
    first, second = Machine(), Machine()
    load(first, 128 * MIB, tmp_path)
    context = make_context(second, 128 * MIB, profile_dir=str(tmp_path))
    if spoil == "much less memory":  # the step must be halved
        context = make_context(second, 60 * MIB, profile_dir=str(tmp_path))
    elif spoil == "longer contexts":
        context = dataclasses.replace(context, window=8192)
    elif spoil == "another fingerprint":
        context = dataclasses.replace(context, fingerprint="e" * 64)
    else:
        (file,) = tmp_path.iterdir()
        file.write_bytes(file.read_bytes()[:-20])
    profile(context)
    assert len(second.steps) >= len(first.steps)


def test_a_step_that_was_halved_is_tried_again_with_more_memory(tmp_path: Path) -> None:
    first, second = Machine(), Machine()
    halved = load(first, 60 * MIB, tmp_path)
    whole = load(second, 128 * MIB, tmp_path)
    assert halved.limits.tokens < whole.limits.tokens == 1024


def test_no_directory_to_write_to_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    profile(make_context(Machine(), 128 * MIB, profile_dir=str(tmp_path / "file" / "below")))


def test_an_error_that_is_not_about_memory_is_not_taken_for_one() -> None:
    machine = Machine()
    machine.bug = True
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        profile(make_context(machine, 128 * MIB))


def test_where_few_layers_show_too_little_every_step_is_said_to_take_more() -> None:
    """Half of the layers show nine tenths of the truth."""
    machine, whole = Machine(), Machine()

    @contextmanager
    def shallow() -> Iterator[None]:
        machine.token_bytes = 45_000
        yield
        machine.token_bytes = 50_000

    context = make_context(machine, 128 * MIB)
    found = profile(dataclasses.replace(context, shallow=shallow))
    for shape in machine.steps:
        assert found.cost.step(*dataclasses.astuple(shape)) >= machine.cost(shape)
    expected = profile(make_context(whole, 128 * MIB))
    assert 0.95 <= found.step_bytes / expected.step_bytes < 1.1
    assert found.kv_bytes + found.step_bytes <= 128 * MIB
    assert not found.shrunk


def test_each_shape_is_tried_as_often_as_is_said() -> None:
    counts = []
    for repeats in (1, 3):
        machine = Machine()
        profile(dataclasses.replace(make_context(machine, 128 * MIB), repeats=repeats))
        counts.append(len(machine.steps) - 4)  # three to warm up, one to validate
    assert counts[1] == 3 * counts[0]
