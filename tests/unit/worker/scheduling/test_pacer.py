"""The pacer: chunks that keep running streams near a target."""

from __future__ import annotations

import pytest

from penstock.worker.scheduling.policy import StepPacer


def test_without_a_target_there_is_no_bound() -> None:
    pacer = StepPacer(None)
    pacer.observe(decodes=3, prefill_tokens=500, duration_s=9.0)
    assert pacer.chunk_limit(decodes=3) is None


def test_a_prompt_that_nobody_waits_beside_is_not_slowed() -> None:
    pacer = StepPacer(0.01)
    pacer.observe(decodes=0, prefill_tokens=500, duration_s=9.0)
    assert pacer.chunk_limit(decodes=0) is None


def test_the_first_chunk_beside_streams_is_small() -> None:
    assert StepPacer(0.1, floor_tokens=16).chunk_limit(decodes=1) == 16


def test_the_chunk_fills_what_the_decodes_leave_of_the_target() -> None:
    pacer = StepPacer(0.1)
    for _ in range(50):
        pacer.observe(decodes=4, prefill_tokens=0, duration_s=0.04)
        pacer.observe(decodes=4, prefill_tokens=100, duration_s=0.04 + 100 * 0.0002)
    limit = pacer.chunk_limit(decodes=4)
    assert limit == pytest.approx(0.06 / 0.0002, abs=1)


def test_a_lone_prompt_teaches_the_cost_of_a_token_without_a_base() -> None:
    pacer = StepPacer(0.1)
    pacer.observe(decodes=0, prefill_tokens=200, duration_s=0.1)
    assert pacer.chunk_limit(decodes=1) == pytest.approx(200, abs=1)


def test_a_prompt_gets_half_of_the_time_when_the_decodes_take_all_of_the_target() -> None:
    pacer = StepPacer(0.01, floor_tokens=8)
    pacer.observe(decodes=4, prefill_tokens=0, duration_s=0.5)
    pacer.observe(decodes=4, prefill_tokens=10, duration_s=0.6)
    assert pacer.chunk_limit(decodes=4) == 50  # 10 ms each, beside 500 ms of decoding


def test_one_slow_step_is_forgotten_within_a_few() -> None:
    pacer = StepPacer(0.1)
    pacer.observe(decodes=0, prefill_tokens=100, duration_s=10.0)
    for _ in range(30):
        pacer.observe(decodes=0, prefill_tokens=100, duration_s=0.02)
    limit = pacer.chunk_limit(decodes=1)
    assert limit == pytest.approx(500, rel=0.05)


def test_a_step_as_quick_as_its_decodes_does_not_divide_by_zero() -> None:
    pacer = StepPacer(0.1, floor_tokens=8)
    pacer.observe(decodes=1, prefill_tokens=0, duration_s=0.05)
    pacer.observe(decodes=1, prefill_tokens=10, duration_s=0.04)
    assert pacer.chunk_limit(decodes=1) == 8


def test_a_prompt_gives_way_to_other_models_as_to_streams_of_its_own() -> None:
    pacer = StepPacer(0.1)
    pacer.observe(decodes=0, prefill_tokens=100, duration_s=0.2)
    assert pacer.chunk_limit(decodes=0) is None
    pacer.crowded = True
    assert pacer.chunk_limit(decodes=0) == 50
