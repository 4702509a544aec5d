"""The seeds of choices."""

from __future__ import annotations

from penstock.server.api.fields import seed_of


def test_seeds_of_choices_differ_and_repeat() -> None:
    seeds = [seed_of(7, choice) for choice in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert seeds == [seed_of(7, choice) for choice in range(100)]
    assert seed_of(8, 1) not in seeds
    assert all(0 <= seed < 2**63 for seed in seeds)
