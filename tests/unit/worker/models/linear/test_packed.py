"""Packed weights mean what their formulas say, in any tile, alone and fused."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from penstock.testing import quantised
from penstock.worker.models.linear import (
    PackedLinear,
    PackedWeight,
    Parts,
    PlainWeight,
    fuse,
    weight_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMATS = ("int8", *quantised.FORMS)


def random_weight(outputs: int, inputs: int, seed: int) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    # Scales of all sizes: outputs and blocks differ by orders of magnitude.
    sizes = torch.logspace(-3, 2, outputs)[torch.randperm(outputs, generator=chance)]
    return torch.randn(outputs, inputs, generator=chance) * sizes[:, None]


def packed(form: str, weight: Tensor, scratch: Tensor) -> tuple[PackedWeight, Tensor]:
    """A weight and the numbers that it stands for."""
    if form == "int8":
        return quantised.rounded_to_int8(weight, scratch), quantised.int8_numbers(weight)
    of = quantised.FORMS[form]
    stored = of.pack(weight)
    shape = weight.shape[0], weight.shape[1]
    made, found = quantised.served(stored, shape, of.said, scratch)
    assert found.format.name == of.format
    assert found.parameters == weight.numel()
    assert found.resident_bytes == sum(buffer.nbytes for buffer in made.buffers())
    return made, of.numbers(stored)


def check_numbers(form: str, shape: tuple[int, int]) -> None:
    scratch = torch.empty(50 * shape[1])
    weight, numbers = packed(form, random_weight(*shape, seed=1), scratch)
    assert weight.shape == shape
    assert torch.equal(weight.dequantised(), numbers)
    for begin, end in ((0, 3), (2, shape[0]), (shape[0] - 1, shape[0])):
        some = torch.empty(end - begin, shape[1])
        weight.dequantise(begin, end, some)
        assert torch.equal(some, numbers[begin:end])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", [(256, 384), (72, 320)])
def test_codes_stand_for_the_numbers_of_the_formula(form: str, shape: tuple[int, int]) -> None:
    check_numbers(form, shape)


@pytest.mark.parametrize("form", ["fp8-block", "fp8-channel", "int8", "ct-int8"])
@pytest.mark.parametrize("shape", [(200, 300), (7, 131), (130, 129)])
def test_shapes_that_are_no_whole_groups(form: str, shape: tuple[int, int]) -> None:
    check_numbers(form, shape)


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_one_group_for_all_inputs(form: str) -> None:
    """`group_size` -1: the only scale of an output is float32 in memory."""
    of, weight = quantised.FORMS[form], random_weight(64, 96, seed=4)
    assert isinstance(of.pack, partial)
    stored = of.pack(weight, group=96)
    made, found = quantised.served(stored, (64, 96), of.said, torch.empty(64 * 96))
    assert made.scales.dtype == torch.float32
    assert found.resident_bytes == sum(buffer.nbytes for buffer in made.buffers())
    assert torch.equal(made.dequantised(), of.numbers(stored))


@pytest.mark.parametrize("form", FORMATS)
def test_bfloat16_rounds_the_numbers_once(form: str) -> None:
    scratch = torch.empty(50 * 192, dtype=torch.bfloat16)
    weight, numbers = packed(form, random_weight(40, 192, seed=3), scratch)
    assert torch.equal(weight.dequantised(), numbers.bfloat16())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tile", [1, 50, 1000])
def test_a_product_is_that_of_the_numbers(form: str, tile: int) -> None:
    weight, numbers = packed(form, random_weight(200, 320, seed=2), torch.empty(tile * 320))
    rows = torch.randn(5, 320, generator=torch.Generator().manual_seed(0))
    bias, before = torch.linspace(0, 1, 200), torch.randn(5, 200)
    expected = rows.double() @ numbers.double().t()
    product = PackedLinear(weight, nn.Parameter(bias, requires_grad=False))(rows[None])[0]
    torch.testing.assert_close(product.double(), expected + bias, rtol=1e-4, atol=1e-3)
    added = before.clone()
    weight.multiply_add(rows, added)
    torch.testing.assert_close(added.double(), expected + before, rtol=1e-4, atol=1e-3)


def linears(form: str, outputs: Sequence[int]) -> tuple[list[PackedLinear], Tensor]:
    scratch = torch.empty(64 * 256)
    made = [
        packed(form, random_weight(size, 256, seed), scratch) for seed, size in enumerate(outputs)
    ]
    return [PackedLinear(weight, None) for weight, _ in made], torch.cat([n for _, n in made])


@pytest.mark.parametrize(
    ("form", "outputs", "joined"),
    [
        ("fp8-block", (256, 128, 128), True),
        ("fp8-block", (256, 128, 40), True),  # the last may end within a block
        ("fp8-block", (192, 96, 96), False),  # blocks would reach into the next
        ("int8", (192, 96, 96), True),
        ("fp8-tensor", (192, 96, 96), True),
        ("mxfp8", (192, 96, 96), True),
        ("ct-pack4", (192, 96, 96), True),
        ("gptq-order", (192, 96, 96), True),  # of one order
        ("awq", (192, 96, 96), True),
        ("nvfp4", (192, 96, 96), True),  # each with a scale of its own for the whole
        ("nf4", (192, 96, 96), True),
        ("nf4-double", (192, 96, 96), False),  # scales of scales are of the whole
    ],
)
def test_fused_outputs_keep_their_own_scales(
    form: str, outputs: tuple[int, ...], joined: bool
) -> None:
    modules, numbers = linears(form, outputs)
    fused = fuse(modules)
    assert isinstance(fused, Parts) != joined
    assert fused.shape == numbers.shape
    rows = torch.eye(256)
    assert torch.equal(fused.product(rows).t(), numbers)
    # Each layer is still itself, in the same memory.
    own = [w for module in modules if isinstance(w := module.linear_weight, PackedWeight)]
    apart = torch.cat([weight.dequantised() for weight in own])
    assert torch.equal(apart, numbers)
    if isinstance(fused, PackedWeight):
        begin, size = fused.codes.data_ptr(), fused.codes.nbytes
        starts = [weight.codes.data_ptr() for weight in own]
        assert all(begin <= start < begin + size for start in starts)


def test_layers_of_different_formats_are_fused_as_parts() -> None:
    (eight,), numbers = linears("int8", (64,))
    (blocks,), others = linears("fp8-block", (64,))
    plain = nn.Linear(256, 32, bias=False).requires_grad_(False)
    fused = fuse([eight, plain, blocks])
    expected = torch.cat([numbers, plain.weight, others])
    assert torch.equal(fused.product(torch.eye(256)).t(), expected)
    added = torch.ones(256, 160)
    fused.multiply_add(torch.eye(256), added)
    torch.testing.assert_close(added.t() - 1, expected, rtol=1e-4, atol=1e-4)


def test_plain_layers_become_views_of_one_weight() -> None:
    modules = [nn.Linear(8, size, bias=False).requires_grad_(False) for size in (4, 2)]
    before = torch.cat([module.weight for module in modules])
    fused = fuse(modules)
    assert isinstance(fused, PlainWeight) and torch.equal(fused.tensor, before)
    assert modules[1].weight.data_ptr() == fused.tensor[4:].data_ptr()


def test_only_linear_layers_have_a_weight() -> None:
    class Peculiar(nn.Linear):
        """Computes something else."""

    assert weight_of(nn.Linear(2, 3)) is not None
    assert weight_of(Peculiar(2, 3)) is None
    assert weight_of(nn.LayerNorm(2)) is None
    assert weight_of(None) is None
