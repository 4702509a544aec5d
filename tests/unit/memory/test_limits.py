from __future__ import annotations

import dataclasses

import pytest

from penstock.errors import ModelTooLarge
from penstock.memory.gauge import GpuReading, RamReading
from penstock.memory.limits import (
    GIB,
    GPU_PROCESS_BYTES,
    GPU_SPARE,
    MAX_WINDOWS,
    MIB,
    MIN_KV_TOKENS,
    RAM_PROCESS_BYTES,
    RAM_SPARE,
    TEMPLATE_BYTES,
    LoadNeed,
    LoadPlan,
    domain_of,
    plan_load,
    resolve_limit,
    resolve_limits,
    step_reserve,
)

NEED = LoadNeed(
    name="model",
    domain="ram",
    weight_bytes=500 * MIB,
    kv_bytes_per_token=64 << 10,
    context=4096,  # a window is 256 MiB
    step_bytes=100 * MIB,
)
FIXED = RAM_PROCESS_BYTES + 600 * MIB
WINDOW = 256 * MIB


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
    ram = RamReading(64 * GIB, 60 * GIB, cgroup_limit_bytes=4 * GIB, cgroup_used_bytes=0)
    gpus = [GpuReading(0, "a", "GPU-a", 10 * GIB, 9 * GIB)]
    assert resolve_limits("auto", "50%", ram, gpus) == {"ram": 3 * GIB, "gpu:0": 5 * GIB}


def test_a_device_has_a_domain() -> None:
    assert [domain_of(d) for d in ("cpu", "cuda:1")] == ["ram", "gpu:1"]


def limits_with_room(room: int) -> dict[str, int]:
    return {"ram": TEMPLATE_BYTES + FIXED + room}


def test_kv_gets_a_share_of_the_room_but_a_whole_window_first() -> None:
    assert plan_load(NEED, limits_with_room(4 * GIB), []).kv_bytes == 2 * GIB
    assert plan_load(NEED, limits_with_room(300 * MIB), []).kv_bytes == WINDOW
    assert plan_load(NEED, limits_with_room(200 * MIB), []).kv_bytes == 200 * MIB
    assert plan_load(NEED, limits_with_room(400 * GIB), []).kv_bytes == MAX_WINDOWS * WINDOW


def test_models_already_there_are_taken_off_in_their_own_domain_only() -> None:
    held = [LoadPlan("ram", GIB, GIB), LoadPlan("gpu:0", 40 * GIB, 40 * GIB)]
    plan = plan_load(NEED, limits_with_room(6 * GIB), held)
    assert plan == LoadPlan("ram", FIXED, 2 * GIB)
    assert plan.total_bytes == FIXED + 2 * GIB


def test_a_gpu_pays_for_its_context_and_not_for_the_template() -> None:
    need = dataclasses.replace(NEED, domain="gpu:0")
    room = 100 * MIB
    limits = {"ram": 0, "gpu:0": GPU_PROCESS_BYTES + 600 * MIB + room}
    assert plan_load(need, limits, []).kv_bytes == room


def test_the_smallest_room_loads_and_one_byte_less_is_refused_with_the_numbers() -> None:
    least = MIN_KV_TOKENS * NEED.kv_bytes_per_token
    assert plan_load(NEED, limits_with_room(least), []).kv_bytes == least
    limits = limits_with_room(least - 1)
    with pytest.raises(ModelTooLarge, match=r"memory\.limit") as caught:
        plan_load(NEED, limits, [])
    assert caught.value.numbers == {
        "reason": "memory",
        "domain": "ram",
        "needed_bytes": limits["ram"] + 1,
        "limit_bytes": limits["ram"],
    }
    with pytest.raises(ModelTooLarge, match="hold 10 MiB: unload one"):
        plan_load(NEED, limits_with_room(least), [LoadPlan("ram", 8 * MIB, 2 * MIB)])


def test_an_explicit_size_is_kept_or_refused() -> None:
    limits = limits_with_room(GIB)
    wanted = dataclasses.replace(NEED, kv_bytes=700 * MIB)
    assert plan_load(wanted, limits, []).kv_bytes == 700 * MIB
    for size in (GIB + 1, 1):
        with pytest.raises(ModelTooLarge, match="kv_bytes"):
            plan_load(dataclasses.replace(NEED, kv_bytes=size), limits, [])


def test_a_wider_step_reserves_more() -> None:
    base = step_reserve(512, 64, 576, 49152, 4)
    assert step_reserve(1024, 64, 576, 49152, 4) - base == 512 * 576 * 24 * 4
    assert step_reserve(512, 65, 576, 49152, 4) - base == 49152 * 6 * 4
