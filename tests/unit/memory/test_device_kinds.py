"""What is chosen for a model on each kind of device."""

from __future__ import annotations

import pytest

from penstock.memory.device_kinds import CPU, CUDA, kind_of

GIB = 1 << 30


def test_a_device_has_the_kind_that_its_name_begins_with() -> None:
    assert [kind_of(name) for name in ("cpu", "cuda", "cuda:3")] == [CPU, CUDA, CUDA]


@pytest.mark.parametrize(
    ("device", "stored", "served"),
    [
        ("cpu", "bfloat16", "float32"),
        ("cpu", "float32", "float32"),
        ("cuda:0", "float16", "float16"),
        ("cuda:0", "bfloat16", "bfloat16"),
        ("cuda:0", "float32", "bfloat16"),
    ],
)
def test_a_gpu_computes_in_16_bits_and_a_cpu_in_32(device: str, stored: str, served: str) -> None:
    assert kind_of(device).dtype_for(stored) == served


def test_only_a_large_gpu_has_large_steps() -> None:
    assert CUDA.step_within(16 * GIB) == (8192, 128)
    assert CUDA.step_within(16 * GIB - 1) == CPU.step_within(999 * GIB) == (1024, 64)
