"""How many drafts: by what steps take and what drafts are worth; simulated against none."""

from __future__ import annotations

from random import Random

import pytest

from penstock.worker.core.drafts.control import DraftControl, StepTimes


def seconds(rows: int) -> float:
    """Stairs of four rows, as on a CPU."""
    return 0.02 + 0.004 * -(-rows // 4)


def taught(noise: float = 0.0, rows: range = range(1, 40)) -> DraftControl:
    control, chance = DraftControl(), Random(0)
    for _ in range(30):
        for count in rows:
            control.observe(count, 0, seconds(count) * (1 + noise * chance.random()))
    return control


def test_a_time_that_is_not_known_is_that_of_the_nearest_in_proportion() -> None:
    times = StepTimes()
    one, nine = times.of([1, 9])
    assert nine / one == pytest.approx(17 / 9)  # before anything is known
    times.observe(4, 0.1)
    assert times.of([4, 12, 2]) == pytest.approx([0.1, 0.1 * 20 / 12, 0.1 * 10 / 12])
    times.observe(8, 0.2)
    assert times.of([4, 5, 7, 8]) == pytest.approx([0.1, 0.1 * 13 / 12, 0.2 * 15 / 16, 0.2])


def test_times_keep_the_proportions_that_were_measured_at_the_load() -> None:
    times = StepTimes([(1, 1.0), (2, 1.5), (4, 0.9), (16, 1.9)])
    assert times.of([1, 2, 3, 4, 10, 40]) == pytest.approx([1, 1.5, 1.2, 0.9, 1.4, 1.9 * 48 / 24])
    times.observe(1, 0.01)  # another machine's, a hundred times as quick
    assert times.of([1, 2, 4]) == pytest.approx([0.01, 0.015, 0.009])
    times.observe(4, 0.02)
    assert times.of([1, 2, 3, 4, 16]) == pytest.approx(
        [0.01, 0.015, 0.02 * 1.2 / 0.9, 0.02, 0.02 * 1.9 / 0.9]
    )


def test_a_wild_measurement_is_tamed_and_an_old_one_forgotten() -> None:
    times = StepTimes()
    for _ in range(10):
        times.observe(1, 0.1)
    times.observe(1, 50.0)
    assert times.of([1])[0] < 0.14
    for _ in range(600):
        times.observe(3, 0.3)
    assert times.of([1])[0] == pytest.approx(0.3 * 9 / 11)


def test_sure_drafts_fill_the_stair_and_doubtful_ones_are_none() -> None:
    control = taught()
    assert control.choose([[0.02, 0.0004]], streams=1, spare=30) == []
    sure = control.choose([[0.99**n for n in range(1, 16)]], streams=1, spare=30)
    assert len(sure) == 15
    # The fifth row begins a stair: one that is likely is worth it only with more behind it.
    assert len(control.choose([[0.5, 0.45, 0.4, 0.05]], streams=1, spare=30)) == 3


def test_the_surest_come_first_and_no_draft_before_those_it_depends_on() -> None:
    control = taught()
    chances = [[0.9, 0.8, 0.1], [0.95, 0.2, 0.19], [0.01]]
    picked = control.choose(chances, streams=3, spare=4)
    assert picked[:3] == [1, 0, 0]
    assert len(picked) <= 4 and picked.count(2) == 0


def test_there_is_never_more_than_there_is_room_for() -> None:
    control = taught()
    for spare in (-1, 0, 1, 3):
        assert len(control.choose([[0.99] * 8] * 4, streams=4, spare=spare)) <= max(0, spare)


def test_a_plain_step_is_run_now_and_then() -> None:
    control = taught()
    drafted = 0
    for _ in range(1000):
        picked = control.choose([[0.99] * 8], streams=1, spare=8)
        control.observe(1 + len(picked), len(picked), seconds(1 + len(picked)))
        drafted += bool(picked)
    assert 900 < drafted < 1000


@pytest.mark.parametrize(("chance", "least", "most"), [(0.0, 0.97, 1.01), (0.9, 2.0, 9.0)])
def test_in_the_long_run_it_is_never_slower_than_without(
    chance: float, least: float, most: float
) -> None:
    """Drafts whose confidence is right, steps whose times are noisy, and a control that knows
    nothing at first."""
    random, control = Random(1), DraftControl()
    tokens, spent_s = 0, 0.0
    while tokens < 4000:
        survivals = [chance**n for n in range(1, 9)]
        count = len(control.choose([survivals], streams=1, spare=8))
        took_s = seconds(1 + count) * random.choice([0.9, 1.0, 1.0, 1.1, 3.0])
        control.observe(1 + count, count, took_s)
        right = 0
        while right < count and random.random() < chance:
            right += 1
        tokens, spent_s = tokens + 1 + right, spent_s + took_s
    plain_s = 4000 * seconds(1) * 1.4  # the mean of the noise
    assert least < plain_s / spent_s < most
