from __future__ import annotations

from dataclasses import dataclass

from penstock.memory.slack import HOLD_S, NOISE_BYTES, Slack

MIB = 1 << 20


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_rises_at_once_up_to_its_bound_and_noise_is_nothing() -> None:
    slack = Slack(100 * MIB)
    slack.observe(NOISE_BYTES)
    assert slack.bytes == 0
    slack.observe(40 * MIB)
    assert slack.bytes == 40 * MIB
    slack.observe(500 * MIB)
    assert slack.bytes == 100 * MIB


def test_it_holds_then_halves_until_it_is_gone() -> None:
    clock = Clock()
    slack = Slack(100 * MIB, clock)
    slack.observe(40 * MIB)
    sizes = []
    for _ in range(4):
        clock.now += HOLD_S / 2
        slack.observe(0)
        sizes.append(slack.bytes // MIB)
        clock.now += HOLD_S / 2
        slack.observe(0)
        sizes.append(slack.bytes // MIB)
    assert sizes == [40, 20, 20, 10, 10, 0, 0, 0]


def test_a_surprise_that_stays_is_held() -> None:
    clock = Clock()
    slack = Slack(100 * MIB, clock)
    for _ in range(10):
        clock.now += HOLD_S
        slack.observe(40 * MIB)
        assert slack.bytes == 40 * MIB


def test_it_can_be_forgotten() -> None:
    slack = Slack(100 * MIB)
    slack.observe(40 * MIB)
    slack.reset()
    assert slack.bytes == 0
