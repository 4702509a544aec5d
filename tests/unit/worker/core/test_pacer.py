"""The pacer: chunks that keep running streams near a target."""

from __future__ import annotations

import pytest

from penstock.worker.core.pacer import StepPacer


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
    assert limit == pytest.approx((0.08 - 0.04) / 0.0002, abs=1)


def test_a_lone_prompt_teaches_the_cost_of_a_token_without_a_base() -> None:
    pacer = StepPacer(0.1)
    pacer.observe(decodes=0, prefill_tokens=200, duration_s=0.1)
    assert pacer.chunk_limit(decodes=1) == pytest.approx(160, abs=1)


def test_a_prompt_gets_half_of_the_time_when_the_decodes_take_all_of_the_target() -> None:
    pacer = StepPacer(0.01, floor_tokens=8)
    pacer.observe(decodes=4, prefill_tokens=0, duration_s=0.5)
    for _ in range(50):
        pacer.observe(decodes=4, prefill_tokens=100, duration_s=1.5)
    assert pacer.chunk_limit(decodes=4) in (49, 50)  # 10 ms each, beside 500 ms of decoding


def test_one_slow_step_is_forgotten_within_a_few() -> None:
    pacer = StepPacer(0.1)
    pacer.observe(decodes=0, prefill_tokens=100, duration_s=10.0)
    for _ in range(30):
        pacer.observe(decodes=0, prefill_tokens=100, duration_s=0.02)
    limit = pacer.chunk_limit(decodes=1)
    assert limit == pytest.approx(400, rel=0.05)


def test_the_first_chunk_counts_as_the_whole_step() -> None:
    pacer = StepPacer(0.1, floor_tokens=8)
    pacer.observe(decodes=1, prefill_tokens=0, duration_s=0.05)
    pacer.observe(decodes=1, prefill_tokens=10, duration_s=0.04)
    assert pacer.chunk_limit(decodes=1) == 12  # 4 ms each, although decoding took longer


def test_the_last_few_tokens_of_a_prompt_teach_little() -> None:
    """Their step takes as long as one of decodes only, give or take."""
    pacer = StepPacer(0.3)
    pacer.observe(decodes=1, prefill_tokens=0, duration_s=0.03)
    for _ in range(20):
        pacer.observe(decodes=1, prefill_tokens=100, duration_s=0.23)
    before = pacer.chunk_limit(decodes=1)
    for duration_s in (0.02, 0.03):
        pacer.observe(decodes=1, prefill_tokens=4, duration_s=duration_s)
    assert pacer.chunk_limit(decodes=1) == pytest.approx(before, rel=0.05)


def test_a_prompt_gives_way_to_other_models_as_to_streams_of_its_own() -> None:
    pacer = StepPacer(0.1)
    pacer.observe(decodes=0, prefill_tokens=100, duration_s=0.2)
    assert pacer.chunk_limit(decodes=0) is None
    pacer.crowded = True
    assert pacer.chunk_limit(decodes=0) == 40


def test_prompts_that_wait_for_each_other_keep_the_pace_too() -> None:
    pacer = StepPacer(0.1)
    pacer.observe(decodes=0, prefill_tokens=100, duration_s=0.2)  # 2 ms each
    assert pacer.chunk_limit(decodes=0) is None
    assert pacer.chunk_limit(decodes=0, prompts=2) == 40


def test_a_chunk_of_one_token_does_not_spoil_what_larger_ones_teach() -> None:
    pacer = StepPacer(0.3)
    pacer.observe(decodes=0, prefill_tokens=1, duration_s=0.075)
    pacer.observe(decodes=1, prefill_tokens=0, duration_s=0.05)
    for _ in range(8):
        count = pacer.chunk_limit(decodes=1)
        assert count is not None
        duration_s = 0.05 + 0.002 * count
        assert duration_s <= 0.3
        pacer.observe(decodes=1, prefill_tokens=count, duration_s=duration_s)
    assert pacer.chunk_limit(decodes=1) == pytest.approx((0.24 - 0.05) / 0.002, rel=0.1)
