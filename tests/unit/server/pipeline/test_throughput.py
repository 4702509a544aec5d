"""How fast a line moves: rushes, bursts, silence, and promises that are kept."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import dataclass

import pytest

from penstock.server.pipeline.throughput import ThroughputEstimator


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def rush(
    rate: ThroughputEstimator, clock: Clock, starts: int, every_s: float, together: int = 1
) -> None:
    """Ends in groups, each group after a pause, and as many more at work each time."""
    rate.begin_backlog()
    for _ in range(starts // together):
        for turn in (turns := [object() for _ in range(together)]):
            rate.began(turn)
        clock.now += every_s * together
        for turn in turns:
            rate.ended(turn)


def test_the_rate_follows_starts_and_silence() -> None:
    clock = Clock()
    rate = ThroughputEstimator(clock)
    rush(rate, clock, 100, 0.1)
    assert rate.per_s() == pytest.approx(10, rel=0.2)
    assert rate.until(20) == pytest.approx(2, rel=0.2)
    clock.now += 20
    assert rate.per_s() == pytest.approx(100 / 30, rel=0.1)


def test_a_batch_that_ends_together_is_not_taken_for_speed() -> None:
    clock = Clock()
    rate = ThroughputEstimator(clock)
    rush(rate, clock, 64 * 4, 1 / 32, together=64)
    assert rate.per_s() == pytest.approx(32, rel=0.1)


def test_time_without_a_line_is_no_silence_and_the_next_rush_begins_from_the_last() -> None:
    clock = Clock()
    rate = ThroughputEstimator(clock)
    assert rate.per_s() == pytest.approx(0.5)  # nothing was ever seen
    rush(rate, clock, 50, 0.1)
    rate.end_backlog()
    clock.now += 3600
    rate.begin_backlog()
    assert rate.per_s() == pytest.approx(10, rel=0.05)
    rush(rate, clock, 40, 0.5)  # slower this time
    assert rate.per_s() == pytest.approx(2, rel=0.15)


def test_requests_that_came_alone_tell_nothing_of_a_full_batch() -> None:
    clock = Clock()
    rate = ThroughputEstimator(clock)

    def batches() -> None:
        """Twelve at once, each as long as a full batch takes."""
        rate.begin_backlog()
        for _ in range(4):
            for turn in (turns := [object() for _ in range(12)]):
                rate.began(turn)
            clock.now += 1.0
            for turn in turns:
                rate.ended(turn)

    batches()
    rate.end_backlog()
    for _ in range(50):  # a tenth of the time, with nobody beside it
        turn = object()
        rate.began(turn)
        clock.now += 0.1
        rate.ended(turn)
    rate.begin_backlog()
    for _ in range(12):
        rate.began(object())
    clock.now += 0.3
    assert rate.per_s() == pytest.approx(12, rel=0.2)


def test_no_place_is_promised_twice() -> None:
    clock = Clock()
    rate = ThroughputEstimator(clock)
    rush(rate, clock, 100, 0.1)
    promises = [rate.promise() for _ in range(10)]
    assert [promise.place for promise in promises] == list(range(1, 11))
    assert [promise.expected_s for promise in promises] == pytest.approx(
        [place / rate.per_s() for place in range(1, 11)]
    )
    run_in_thread_if_large = [b.come_s - a.come_s for a, b in itertools.pairwise(promises)]
    assert run_in_thread_if_large == pytest.approx([0.12] * 9, rel=0.1)
    clock.now += 60
    assert rate.promise().place == 1


def test_promises_of_a_slower_time_block_nobody() -> None:
    clock = Clock()
    rate = ThroughputEstimator(clock)
    slow = [rate.promise().come_s for _ in range(100)]  # nothing was seen yet: one in two seconds
    assert slow[-1] > 200
    rush(rate, clock, 100, 0.1)
    assert rate.promise().come_s < 1


class Shop:
    """A worker of four, service times that vary threefold, a line of eight."""

    def __init__(self, seed: int) -> None:
        self.clock, self.chance = Clock(), random.Random(seed)
        self.rate = ThroughputEstimator(self.clock)
        self.starts: list[float] = []
        self.at_work: dict[float, object] = {}  # by when each is done
        for _ in range(4):
            self.start()
        self.waiting = 8
        self.rate.begin_backlog()

    def advance(self, until: float) -> None:
        while self.at_work and min(self.at_work) <= until:
            self.clock.now = min(self.at_work)
            self.rate.ended(self.at_work.pop(self.clock.now))
            if self.waiting:
                self.waiting -= 1
                self.start()
        self.clock.now = until

    def start(self) -> None:
        turn = self.at_work[self.clock.now + self.chance.uniform(0.5, 1.5)] = object()
        self.starts.append(self.clock.now)
        self.rate.began(turn)

    def come(self) -> bool:
        if len(self.at_work) < 4:
            self.start()
        elif self.waiting < 8:
            self.waiting += 1
        else:
            return False
        return True


@pytest.mark.parametrize("long_s", [3.0, 20.0])
@pytest.mark.parametrize("seed", range(5))
def test_promises_are_kept(seed: int, long_s: float) -> None:
    """100 clients who are refused and come back exactly when told find a place, whether the line
    has been full for a while or has only just become so."""
    shop = Shop(seed)
    while shop.clock.now < 100 + long_s:
        shop.advance(shop.clock.now + 0.25)
        shop.waiting = 8
    asked = shop.clock.now
    shop.starts.clear()
    told = [shop.rate.promise() for _ in range(100)]
    accepted = 0
    for promise in told:
        shop.advance(asked + promise.come_s)
        accepted += shop.come()
    shop.advance(asked + 200)
    assert accepted >= 95
    # The place that was promised to the k-th is the one that the k-th start leaves.
    real = [start - asked for start in shop.starts[: len(told)]]
    errors = [abs(t.expected_s - r) / r for t, r in zip(told, real, strict=False)]
    assert statistics.median(errors) <= 0.3
