from __future__ import annotations

from dataclasses import dataclass

from penstock.server.residency.drift_reserve import HOLD_S, NOISE_BYTES, DriftReserve

MIB = 1 << 20


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_rises_at_once_up_to_its_bound_and_noise_is_nothing() -> None:
    reserve = DriftReserve(100 * MIB)
    reserve.observe(NOISE_BYTES)
    assert reserve.bytes == 0
    reserve.observe(40 * MIB)
    assert reserve.bytes == 40 * MIB
    reserve.observe(500 * MIB)
    assert reserve.bytes == 100 * MIB


def test_it_holds_then_halves_until_it_is_gone() -> None:
    clock = Clock()
    reserve = DriftReserve(100 * MIB, clock)
    reserve.observe(40 * MIB)
    sizes = []
    for _ in range(4):
        clock.now += HOLD_S / 2
        reserve.observe(0)
        sizes.append(reserve.bytes // MIB)
        clock.now += HOLD_S / 2
        reserve.observe(0)
        sizes.append(reserve.bytes // MIB)
    assert sizes == [40, 20, 20, 10, 10, 0, 0, 0]


def test_a_surprise_that_stays_is_held() -> None:
    clock = Clock()
    reserve = DriftReserve(100 * MIB, clock)
    for _ in range(10):
        clock.now += HOLD_S
        reserve.observe(40 * MIB)
        assert reserve.bytes == 40 * MIB


def test_it_can_be_forgotten() -> None:
    reserve = DriftReserve(100 * MIB)
    reserve.observe(40 * MIB)
    reserve.reset()
    assert reserve.bytes == 0
