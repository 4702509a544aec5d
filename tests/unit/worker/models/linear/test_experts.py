"""Packed experts answer as the module they replace does with the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.testing import quantised, tiny
from penstock.worker.models.linear import PackedExperts, PackedWeight, PlainExperts, experts_of
from penstock.worker.models.linear.experts import PROJECTIONS

pytestmark = pytest.mark.usefixtures("one_thread")


def own_experts() -> Any:
    model: Any = tiny.build(tiny.config("qwen3_moe", hidden_size=136, moe_intermediate_size=72))
    return model.requires_grad_(False).model.layers[0].mlp.experts


def packed(own: Any) -> PackedExperts:
    """Its weights rounded to int8; `own` gets the numbers that they stand for."""
    scratch, inner = torch.empty(50 * 136), own.down_proj.shape[2]
    weights = []
    for expert in range(own.num_experts):
        gate_up, down = own.gate_up_proj[expert], own.down_proj[expert]
        parts = (gate_up[:inner], gate_up[inner:], down)
        read = [quantised.rounded_to_int8(part, scratch) for part in parts]
        weights.append(dict(zip(PROJECTIONS, read, strict=True)))
        for part in parts:
            part.copy_(quantised.int8_numbers(part))
    return PackedExperts(own, weights)


@pytest.mark.parametrize("count", [3, 300])
def test_all_rows_by_all_experts_or_sorted(count: int) -> None:
    own = own_experts()
    ours = packed(own)
    assert ours.adopt_gate()
    chance = torch.Generator().manual_seed(0)
    rows = torch.randn(count, ours.hidden, generator=chance)
    chosen = torch.stack([torch.randperm(ours.count, generator=chance)[:2] for _ in rows])
    shares = torch.rand(count, 2, generator=chance)
    expected = own(rows, chosen, shares)
    torch.testing.assert_close(ours(rows, chosen, shares), expected, rtol=1e-4, atol=1e-4)


def stacked(own: Any) -> PackedExperts:
    """gpt-oss' experts as MXFP4: gate and up as one weight, with biases, inputs first."""
    scratch = torch.empty(50 * 96)
    weights: list[dict[str, PackedWeight]] = []
    of = quantised.FORMS["mxfp4"]
    for expert in range(own.num_experts):
        weights.append({})
        for name in ("gate_up_proj", "down_proj"):
            number = getattr(own, name)[expert]
            stored = of.pack(number.t().contiguous())
            shape = number.shape[1], number.shape[0]
            weights[-1][name] = quantised.served(stored, shape, of.said, scratch)[0]
            number.copy_(of.numbers(stored).t())
    return PackedExperts(own, weights)


@pytest.mark.parametrize("count", [3, 300])
def test_experts_with_biases_and_a_gate_of_their_own(count: int) -> None:
    model: Any = tiny.build(tiny.config("gpt_oss", hidden_size=96, intermediate_size=64))
    own = model.requires_grad_(False).model.layers[0].mlp.experts
    ours = stacked(own)
    assert ours.adopt_gate()
    chance = torch.Generator().manual_seed(0)
    rows = 3 * torch.randn(count, 96, generator=chance)  # as far as its clamps
    chosen = torch.stack([torch.randperm(ours.count, generator=chance)[:2] for _ in rows])
    shares = torch.rand(count, 2, generator=chance)
    expected = own(rows, chosen, shares)
    torch.testing.assert_close(ours(rows, chosen, shares), expected, rtol=1e-4, atol=1e-4)
    own.limit = 1e9
    assert (own(rows, chosen, shares) - expected).abs().max() > 1


class Clamped(nn.Module):
    """Experts whose gates have a limit."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.num_experts = like.num_experts
        self.gate_up_proj, self.down_proj = like.gate_up_proj, like.down_proj

    def forward(self, rows: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        answer = torch.zeros_like(rows)
        for row, (experts, weights) in enumerate(zip(chosen, shares, strict=True)):
            for expert, weight in zip(experts, weights, strict=True):
                gate, up = (self.gate_up_proj[expert] @ rows[row]).chunk(2)
                inner = nn.functional.silu(gate.clamp(max=10.0)) * up
                answer[row] += weight * (self.down_proj[expert] @ inner)
        return answer


def test_experts_that_compute_something_else_are_not_taken() -> None:
    assert not packed(Clamped(own_experts())).adopt_gate()


def test_experts_are_found_by_what_they_are() -> None:
    own = own_experts()
    assert isinstance(experts_of(own), PlainExperts)
    assert experts_of(ours := packed(own)) is ours
    assert experts_of(nn.Linear(2, 3)) is None
