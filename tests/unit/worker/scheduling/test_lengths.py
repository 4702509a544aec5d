"""Lengths that are learned and forgotten, and the peak against a simulation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.worker.scheduling.lengths import OutputLengths, future_peak_blocks

batches = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), max_size=8)


def simulated_peak(sequences: list[tuple[int, int]], block_tokens: int) -> int:
    """Decode all of them step by step and look."""
    peak = 0
    for step in range(max((remaining for _, remaining in sequences), default=0) + 1):
        alive = [now for now, remaining in sequences if remaining >= step]
        peak = max(peak, sum(-(-(now + step) // block_tokens) for now in alive))
    return peak


@given(batches, st.integers(1, 16))
def test_the_peak_is_that_of_a_simulation(batch: list[tuple[int, int]], block_tokens: int) -> None:
    assert future_peak_blocks(batch, block_tokens) == simulated_peak(batch, block_tokens)


def test_it_learns_what_answers_come_to() -> None:
    lengths = OutputLengths()
    before = lengths.mean
    for _ in range(300):
        lengths.observe(30)
    assert before == 512
    assert 30 <= lengths.mean <= 34
    assert lengths.remaining(20) <= 14


def test_it_follows_its_users_and_forgets() -> None:
    lengths = OutputLengths()
    for length in [30] * 300 + [4000] * 300:
        lengths.observe(length)
    assert lengths.mean > 3500
    lengths.reset()
    assert lengths.mean == 512


@given(st.lists(st.integers(0, 1 << 40), max_size=50), st.integers(0, 1 << 22))
def test_bounded_and_never_nothing(observed: list[int], generated: int) -> None:
    lengths = OutputLengths()
    for length in observed:
        lengths.observe(length)
    assert 0 < lengths.remaining(generated) <= max(1 << 23, generated)


def test_an_answer_longer_than_all_others_is_expected_to_double() -> None:
    lengths = OutputLengths()
    assert lengths.remaining(100_000) == 100_000
