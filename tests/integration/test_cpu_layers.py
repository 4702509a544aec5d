"""What the CPU computes in another way gives the answers of what it replaced, and only there."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from penstock.testing import tiny
from penstock.worker.backends.cpu.kernels import layers as cpu_layers
from penstock.worker.backends.cpu.kernels.cpu_kernels import CpuKernels
from penstock.worker.backends.cpu.kernels.memory import EXPERT_ROWS, LayerMemory
from penstock.worker.models.linear import experts_of


def _model(name: str) -> Any:
    return tiny.build(tiny.config(name)).requires_grad_(False)


@torch.inference_mode()
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma2", "phi3", "gpt_oss", "glm4_moe", "qwen3_moe"]
)
def test_an_adopted_model_answers_as_before(name: str) -> None:
    model, ids = _model(name), torch.arange(2, 34)[None]
    expected = model(input_ids=ids, use_cache=False).logits
    CpuKernels().adopt(model)
    torch.testing.assert_close(
        model(input_ids=ids, use_cache=False).logits, expected, rtol=1e-3, atol=1e-4
    )


def test_sums_are_made_in_place_where_the_layer_does_nothing_else() -> None:
    ours, scaled, other = _model("llama"), _model("granite"), _model("gemma2")
    for model in (ours, scaled, other):
        CpuKernels().adopt(model)
    assert isinstance(ours.model.layers[0].forward, cpu_layers.SummedLayer)
    # One multiplies before it adds, one has norms behind its parts.
    for model in (scaled, other):
        assert not isinstance(model.model.layers[0].forward, cpu_layers.SummedLayer)


@torch.inference_mode()
def test_many_rows_answer_as_before() -> None:
    for name in ("llama", "qwen3", "gemma2", "qwen3_moe"):
        model, ids = _model(name), torch.arange(2, 102)[None]
        expected = model(input_ids=ids, use_cache=False).logits
        CpuKernels().adopt(model)
        torch.testing.assert_close(
            model(input_ids=ids, use_cache=False).logits, expected, rtol=1e-3, atol=1e-4
        )


def test_rotation_and_mlp_are_taken_where_they_are_the_same() -> None:
    ours, other = _model("llama"), _model("llama")
    CpuKernels().adopt(ours)
    attention, mlp = ours.model.layers[0].self_attn, ours.model.layers[0].mlp
    plain = other.model.layers[0].self_attn
    assert isinstance(mlp, cpu_layers.GatedMlp)
    assert attention.forward.__func__.__code__ is type(attention).forward.__code__
    assert attention.forward.__func__ is not type(attention).forward
    assert plain.forward.__func__ is type(plain).forward


def test_angles_of_another_kind_are_left_alone() -> None:
    model = _model("gpt_oss")
    before = type(model.model.layers[0].self_attn).forward
    CpuKernels().adopt(model)
    assert model.model.layers[0].self_attn.forward.__func__ is before


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "glm4_moe", "mixtral"])
def test_experts_are_taken_in_slices_whatever_the_router_says(name: str) -> None:
    model = _model(name)
    experts = next(module for path, module in model.named_modules() if path.endswith(".experts"))
    ours = cpu_layers.SlicedExperts.of(experts, LayerMemory())
    assert ours is not None
    weights = experts_of(experts)
    assert weights is not None
    count, hidden = weights.count, weights.hidden
    chance = torch.Generator().manual_seed(1)
    rows = torch.randn(EXPERT_ROWS * 2 + 3, hidden, generator=chance)
    shares = torch.rand(len(rows), 2, generator=chance)
    spread = torch.stack([torch.randperm(count, generator=chance)[:2] for _ in rows])
    for chosen in (spread, torch.tensor([0, 1]).expand(len(rows), 2)):
        torch.testing.assert_close(
            ours(rows, chosen, shares), experts(rows, chosen, shares), rtol=1e-4, atol=1e-6
        )


THREADS = """
import torch
torch.set_num_threads(1)
from penstock.worker.backends.cpu.kernels.cpu_kernels import CpuKernels
CpuKernels()
print(torch.get_num_threads())
"""


def test_torch_keeps_its_number_of_threads_when_numba_starts_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, check=True)
    assert done.stdout.split() == [b"1"]
