from __future__ import annotations

import pytest

from penstock.memory.domains import RAM, Domain
from penstock.memory.limits import (
    GIB,
    GPU_SPARE,
    MIB,
    RAM_SPARE,
    SPARE,
    limit_setting,
    loading_reserve,
    resolve_capacities,
    resolve_limit,
    resolve_limits,
    resolve_spare,
    step_reserve,
)
from penstock.memory.readings.gauge import GpuReading, GroupReading, RamReading


@pytest.mark.parametrize(
    ("setting", "capacity", "spare", "expected"),
    [
        ("auto", 8 * GIB, RAM_SPARE, 7 * GIB),  # 8 % would be less than 1 GiB
        ("auto", 100 * GIB, RAM_SPARE, 92 * GIB),
        ("auto", 16 * GIB, GPU_SPARE, 16 * GIB - 512 * MIB),
        ("auto", 100 * GIB, GPU_SPARE, 98 * GIB),
        ("80%", 10 * GIB, RAM_SPARE, 8 * GIB),
        ("2GiB", 10 * GIB, RAM_SPARE, 2 * GIB),
        ("12345", 10 * GIB, RAM_SPARE, 12345),
        ("20GiB", 10 * GIB, RAM_SPARE, 10 * GIB),
    ],
)
def test_a_limit_is_resolved(
    setting: str, capacity: int, spare: tuple[int, float], expected: int
) -> None:
    assert resolve_limit(setting, capacity, spare) == expected


def test_limits_cover_every_domain_and_mind_the_control_group() -> None:
    ram = RamReading(64 * GIB, 60 * GIB, (GroupReading(4 * GIB, 0),))
    gpus = [GpuReading(0, "a", "GPU-a", 10 * GIB, 9 * GIB)]
    assert resolve_limits("auto", "50%", ram, gpus) == {RAM: 3 * GIB, Domain.gpu(0): 5 * GIB}


def test_each_domain_has_its_setting() -> None:
    assert [limit_setting(d) for d in (RAM, Domain.gpu(1))] == ["memory.limit", "memory.gpu_limit"]


def test_a_little_is_spared_unless_the_user_says_how_much() -> None:
    assert resolve_spare(None, 4 * GIB) == int(4 * GIB * SPARE[1])
    assert resolve_spare(None, 400 * GIB) == SPARE[0]
    assert resolve_spare(0, 4 * GIB) == 0
    assert resolve_spare(8 * GIB, 4 * GIB) == 4 * GIB


def test_capacity_is_the_machines_or_the_control_groups() -> None:
    ram = RamReading(64 * GIB, 60 * GIB, (GroupReading(4 * GIB, 0),))
    gpus = [GpuReading(0, "a", "GPU-a", 10 * GIB, 9 * GIB)]
    assert resolve_capacities(ram, gpus) == {RAM: 4 * GIB, Domain.gpu(0): 10 * GIB}


def test_a_wider_step_reserves_more() -> None:
    base = step_reserve(512, 64, 576, 49152, 4)
    assert step_reserve(1024, 64, 576, 49152, 4) - base == 512 * 576 * 24 * 4
    assert step_reserve(512, 65, 576, 49152, 4) - base == 49152 * 6 * 4


def test_a_load_sets_its_largest_tensor_aside_twice() -> None:
    assert loading_reserve(576, 49153) - loading_reserve(576, 49152) == 2 * 576 * 4
