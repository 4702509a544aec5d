"""Weights as codes and scales: the formats' own layouts, and less lost than by the largest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.testing.quantised import fp8, integers
from penstock.worker.quantize import rounding
from penstock.worker.quantize.schemes import Integers, scheme_for

FIXTURES = Path(__file__).parents[3] / "data" / "quantised"
BF16 = torch.bfloat16
CHANCE = torch.Generator().manual_seed(0)
NORMAL = torch.randn(48, 512, generator=CHANCE) * 0.02
FAR = torch.rand(48, 512, generator=CHANCE) < 0.01
# Ordinary weights, and such as have a few that are far larger.
WEIGHTS = {"normal": NORMAL, "outliers": torch.where(FAR, NORMAL * 6, NORMAL)}
LESS = [(4, 128, 0.85), (4, 32, 0.85), (8, 512, 0.99)]


def numbers(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    groups = torch.unflatten(codes.float() - (1 << (bits - 1)), 1, (scales.shape[1], -1))
    return torch.flatten(groups * scales.float().unsqueeze(2), 1)


def by_the_largest(rows: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    groups = torch.unflatten(rows, 1, (-1, group))
    scales = groups.abs().amax(dim=2, keepdim=True) * 2 / ((1 << bits) - 1)
    scales = scales.to(BF16).float()
    low = 1 << (bits - 1)
    return torch.flatten((groups / scales).round().clamp(-low, low - 1) * scales, 1)


def loss(rows: torch.Tensor, made: torch.Tensor) -> float:
    return float((made - rows).square().sum())


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("bits", "group", "at_most"), LESS)
def test_integers_lose_less_than_by_the_largest(
    kind: str, bits: int, group: int, at_most: float
) -> None:
    rows = WEIGHTS[kind]
    codes, scales = rounding.to_integers(rows, bits, group, BF16)
    assert (codes.dtype, scales.dtype) == (torch.uint8, BF16)
    assert scales.shape == (48, 512 // group)
    assert int(codes.max()) < 1 << bits
    made = loss(rows, numbers(codes, scales, bits))
    assert made < at_most * loss(rows, by_the_largest(rows, bits, group))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_fp8_loses_less_than_by_the_largest(kind: str) -> None:
    rows = WEIGHTS[kind]
    codes, scales = rounding.to_fp8(rows, BF16)
    assert (codes.dtype, scales.shape) == (torch.float8_e4m3fn, (48, 1))
    made = fp8.channel_numbers({"weight": codes, "weight_scale": scales})
    plain = fp8.channel_numbers(fp8.pack_channels(rows))
    assert loss(rows, made) < 0.95 * loss(rows, plain)


def test_codes_are_the_nearest_for_the_scales_that_are_stored() -> None:
    rows = WEIGHTS["normal"]
    codes, scales = rounding.to_integers(rows, 4, 64, BF16)
    made = numbers(codes, scales, 4)
    step = scales.float().abs().repeat_interleave(64, dim=1)
    inside = (codes > 0) & (codes < 15)
    assert bool(((made - rows).abs() <= step * 0.5001)[inside].all())


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_outputs_that_are_zero_or_tiny_become_zero(dtype: torch.dtype) -> None:
    rows = torch.zeros(3, 64)
    rows[1] = 1e-30 if dtype == torch.float16 else 1e-44
    rows[2] = torch.linspace(-1, 1, 64)
    for bits in (4, 8):
        codes, scales = rounding.to_integers(rows, bits, 64, dtype)
        assert numbers(codes, scales, bits)[:2].eq(0).all()
        assert scales[:2].eq(1).all()
    wide, scale = rounding.to_fp8(rows, dtype)
    assert wide[:2].float().eq(0).all()
    assert scale[:2].eq(1).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_refused(bad: float) -> None:
    rows = WEIGHTS["normal"].clone()
    rows[7, 300] = bad
    for bits in (4, 8):
        with pytest.raises(ValueError, match="not finite"):
            rounding.to_integers(rows, bits, 128, BF16)
    with pytest.raises(ValueError, match="not finite"):
        rounding.to_fp8(rows, BF16)


@pytest.mark.parametrize("name", ["ct-pack4", "ct-pack4-channel", "ct-pack8-channel"])
def test_words_are_those_of_the_formats_own_library(name: str) -> None:
    stored = load_file(FIXTURES / f"{name}.safetensors")
    bits = 8 if "8" in name else 4
    outputs, inputs = stored["weight_shape"].tolist()
    scales = (
        stored["weight_scale"]
        .float()
        .repeat_interleave(inputs // stored["weight_scale"].shape[1], dim=1)
    )
    middle = 1 << (bits - 1)
    codes = (integers.ct_numbers(stored) / scales).round().add(middle).to(torch.uint8)
    assert codes.shape == (outputs, inputs)
    assert torch.equal(rounding.to_words(codes, bits), stored["weight_packed"])


@pytest.mark.parametrize(
    ("inputs", "group"), [([4096, 768], 128), ([576, 1536], 64), ([576, 1536, 72], 64), ([96], 32)]
)
def test_one_size_of_groups_for_a_model(inputs: list[int], group: int) -> None:
    scheme = scheme_for("int4", inputs, has_experts=False)
    assert scheme == Integers(4, group)
    assert [scheme.takes(count) for count in inputs] == [count != 72 for count in inputs]
