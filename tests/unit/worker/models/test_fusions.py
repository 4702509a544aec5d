"""Layers are packed where they do nothing beside: what shows only far away or in large numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.testing import quantised, tiny
from penstock.worker.backends.cpu.kernels import layers as cpu_layers
from penstock.worker.backends.cpu.kernels.memory import LayerMemory
from penstock.worker.models import fusions
from penstock.worker.models.linear import PackedLinear, Parts, PlainWeight
from penstock.worker.models.linear.grouped import Int8Weight

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = 10.0


class ClampedMlp(nn.Module):
    """As some architectures have it: nothing is clamped in a sample of ordinary size."""

    def __init__(self, like: Any, limit: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = like.gate_proj, like.up_proj
        self.down_proj, self.act_fn = like.down_proj, like.act_fn
        self.limit = limit

    def forward(self, rows: Tensor) -> Tensor:
        gate = self.gate_proj(rows).clamp(max=self.limit)
        up = self.up_proj(rows).clamp(min=-self.limit, max=self.limit)
        answer: Tensor = self.down_proj(self.act_fn(gate) * up)
        return answer


class ClampedExperts(nn.Module):
    """Two experts whose gates have a limit."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(0)
        self.gate_up_proj = nn.Parameter(torch.randn(2, 24, 16, generator=chance) / 4)
        self.down_proj = nn.Parameter(torch.randn(2, 16, 12, generator=chance) / 4)
        self.limit = limit

    def forward(self, rows: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        answer = torch.zeros_like(rows)
        for row, (experts, weights) in enumerate(zip(chosen, shares, strict=True)):
            for expert, weight in zip(experts, weights, strict=True):
                gate, up = (self.gate_up_proj[expert] @ rows[row]).chunk(2)
                inner = nn.functional.silu(gate.clamp(max=self.limit)) * up
                answer[row] += weight * (self.down_proj[expert] @ inner)
        return answer


def built(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return tiny.build(tiny.config(name, **changes)).requires_grad_(False).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "qwen3_moe"])
def test_layers_of_the_common_shape_are_found(name: str, dtype: torch.dtype) -> None:
    packed = list(fusions.packed_layers(built(name, dtype)))
    assert [layer.index for layer in packed] == [0, 1, 2]
    dense = name != "qwen3_moe"
    assert all(isinstance(layer.mlp, fusions.PackedMlp) == dense for layer in packed)


@torch.inference_mode()
def test_layers_with_packed_weights_are_found_and_stay_what_they_are() -> None:
    model, scratch = built("qwen3"), torch.empty(64 * 96)
    # All of one layer, and of another only what an mlp begins with.
    for path in [*(n for n, m in model.model.layers[0].named_modules() if type(m) is nn.Linear)]:
        layer = model.model.layers[0]
        layer.set_submodule(path, packed(layer.get_submodule(path), scratch))
    mlp = model.model.layers[1].mlp
    mlp.gate_proj = packed(mlp.gate_proj, scratch)
    ids = torch.arange(9)[None]
    before = model(ids).logits
    first, second, third = fusions.packed_layers(model)
    assert isinstance(first.qkv, Int8Weight) and isinstance(first.mlp.gate_up, Int8Weight)
    assert isinstance(second.qkv, PlainWeight) and isinstance(second.mlp.gate_up, Parts)
    assert isinstance(third.mlp.gate_up, PlainWeight)
    torch.testing.assert_close(model(ids).logits, before)


def packed(linear: Any, scratch: Tensor) -> PackedLinear:
    return PackedLinear(quantised.rounded_to_int8(linear.weight, scratch), linear.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_scales_by_position_is_left_alone(dtype: torch.dtype) -> None:
    """Though nothing is scaled at the positions that a sample begins with."""
    rope = dict(tiny.config("ministral3").rope_parameters)
    rope |= {"original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}
    scaled = built("ministral3", dtype, rope_parameters=rope)
    assert list(fusions.packed_layers(scaled)) == []
    plain = built("ministral3", dtype, rope_parameters=rope | {"llama_4_scaling_beta": 0.0})
    assert len(list(fusions.packed_layers(plain))) == 3


def test_an_mlp_with_a_clamp_is_not_packed_with_its_layer() -> None:
    model = built("llama")
    own = model.model.layers[1].mlp = ClampedMlp(model.model.layers[1].mlp, LIMIT)
    packed = list(fusions.packed_layers(model))
    assert packed[1].mlp is own
    assert isinstance(packed[0].mlp, fusions.PackedMlp)


def test_only_mlps_without_a_clamp_are_computed_in_place() -> None:
    """Whether one can be is asked of each that has a limit of its own."""
    model, layers = built("llama"), range(3)
    limits = (float("inf"), LIMIT, 2 * LIMIT)
    for layer, limit in zip(model.model.layers, limits, strict=True):
        layer.mlp = ClampedMlp(layer.mlp, limit)
    cpu_layers.adopt_mlps(model, LayerMemory())
    taken = [isinstance(model.model.layers[i].mlp, cpu_layers.GatedMlp) for i in layers]
    assert taken == [True, False, False]


@pytest.mark.parametrize(("limit", "taken"), [(float("inf"), True), (LIMIT, False)])
def test_only_experts_without_a_clamp_are_sliced(limit: float, taken: bool) -> None:
    experts = ClampedExperts(limit).requires_grad_(False)
    assert (cpu_layers.SlicedExperts.of(experts, LayerMemory()) is not None) == taken


def test_rows_beyond_a_narrow_type_are_not_compared() -> None:
    """Where nothing is clamped, nobody has an answer to the larger rows of a sample."""
    theirs = torch.tensor([[1.0, 2.0], [float("inf"), 1.0]])
    assert fusions.alike(theirs, theirs, 1e-3)
    assert not fusions.alike(theirs.flip(0), theirs.flip(0), 1e-3)  # an ordinary row has one
    assert not fusions.alike(theirs, theirs.nan_to_num(posinf=5.0), 1e-3)
