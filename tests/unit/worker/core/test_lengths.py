"""Lengths that are learned and forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.worker.core.lengths import OutputLengths


def test_it_learns_what_answers_come_to() -> None:
    lengths = OutputLengths()
    before = lengths.remaining(0)
    for _ in range(300):
        lengths.observe(30)
    assert before == 512
    assert 30 <= lengths.remaining(0) <= 34
    assert lengths.remaining(20) <= 14


def test_it_follows_its_users_and_forgets() -> None:
    lengths = OutputLengths()
    for length in [30] * 300 + [4000] * 300:
        lengths.observe(length)
    assert lengths.remaining(0) > 3500


@given(st.lists(st.integers(0, 1 << 40), max_size=50), st.integers(0, 1 << 22))
def test_bounded_and_never_nothing(observed: list[int], generated: int) -> None:
    lengths = OutputLengths()
    for length in observed:
        lengths.observe(length)
    assert 0 < lengths.remaining(generated) <= max(1 << 23, generated)


def test_an_answer_longer_than_all_others_is_expected_to_double() -> None:
    lengths = OutputLengths()
    assert lengths.remaining(100_000) == 100_000
