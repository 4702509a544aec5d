"""Weights as the formats' own libraries write them, and files that are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open

from penstock.testing import quantised
from penstock.worker.models.linear.reading import BrokenTensor
from penstock.worker.models.linear.words import order_of

if TYPE_CHECKING:
    from torch import Tensor

FIXTURES = sorted((Path(__file__).parents[4] / "data" / "quantised").glob("*.safetensors"))


@pytest.mark.parametrize("file", FIXTURES, ids=lambda path: path.stem)
def test_numbers_are_those_of_the_formats_own_library(file: Path) -> None:
    """`make.py` beside the files says how they were made."""
    with safe_open(file, framework="pt") as opened:
        said = json.loads(opened.metadata()["said"])
        stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    numbers = stored.pop("numbers")
    outputs, inputs = numbers.shape
    weight, found = quantised.served(stored, (outputs, inputs), said, torch.empty(7 * inputs))
    assert found.resident_bytes == sum(buffer.nbytes for buffer in weight.buffers())
    # Libraries compute in fewer bits, and round what they have computed once.
    assert torch.equal(weight.dequantised().to(numbers.dtype), numbers)


def test_there_are_weights_of_every_library() -> None:
    libraries = set()
    for file in FIXTURES:
        with safe_open(file, framework="pt") as opened:
            libraries.add(opened.metadata()["library"].partition(" ")[0])
    assert libraries >= {"compressed-tensors", "autoawq", "bitsandbytes", "gptqmodel"}


def not_a_number(tensor: Tensor) -> None:
    tensor.view(torch.uint8)[3, 4] = 0xFF


def infinite(tensor: Tensor) -> None:
    tensor.view(-1)[-1] = torch.inf


def other(tensor: Tensor) -> None:
    tensor.view(-1)[0] += 1


def far(tensor: Tensor) -> None:
    tensor[5] = 99


def not_json(tensor: Tensor) -> None:
    tensor[0] = 0


def zero(tensor: Tensor) -> None:
    tensor.zero_()


@pytest.mark.parametrize(
    ("form", "leaf", "damage", "problem"),
    [
        ("fp8-block", "weight", not_a_number, "codes that are not numbers"),
        ("fp8-block", "weight_scale_inv", infinite, "not finite"),
        ("fp8-channel", "weight", not_a_number, "codes that are not numbers"),
        ("fp8-channel", "weight_scale", infinite, "not finite"),
        ("mxfp8", "weight_scale", not_a_number, "scales that are not numbers"),
        ("ct-int8", "weight_scale", infinite, "not finite"),
        ("ct-pack4", "weight_shape", other, r"is \[73, 320\] instead of \[72, 320\]"),
        ("ct-pack4-order", "weight_g_idx", far, "names group 99 of 10"),
        ("gptq-order", "g_idx", other, "has groups of 31 to 33 inputs instead of 32"),
        ("gptq", "scales", infinite, "not finite"),
        ("awq", "scales", infinite, "not finite"),
        ("mxfp4", "weight_scale", not_a_number, "scales that are not numbers"),
        ("nvfp4", "weight_scale", not_a_number, "codes that are not numbers"),
        ("nvfp4", "weight_global_scale", zero, "is zero"),
        ("nf4", "weight.absmax", infinite, "not finite"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", not_json, "is not JSON"),
    ],
)
def test_a_damaged_file_is_refused_with_the_tensor(
    form: str, leaf: str, damage: object, problem: str
) -> None:
    of = quantised.FORMS[form]
    stored = of.pack(torch.randn(72, 320, generator=torch.Generator().manual_seed(0)))
    assert callable(damage)
    damage(stored[leaf])
    with pytest.raises(BrokenTensor, match=problem) as refused:
        quantised.served(stored, (72, 320), of.said, torch.empty(72 * 320))
    assert refused.value.leaf == leaf


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("shape", [320, 72], r"has shape \[320, 72\]"),
        ("blocksize", 48, "has blocks of 48, which are not parts of 320"),
        ("blocksize", 32, "has 360 scales of blocks of 32"),
        ("nested_blocksize", 128, "other scales of scales"),
        ("nested_offset", None, "other scales of scales"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(key: str, value: object, problem: str) -> None:
    of = quantised.FORMS["nf4-double"]
    stored = of.pack(torch.randn(72, 320, generator=torch.Generator().manual_seed(0)))
    leaf = "weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(stored[leaf].tolist())) | {key: value}
    stored[leaf] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(BrokenTensor, match=problem):
        quantised.served(stored, (72, 320), of.said, torch.empty(72 * 320))


def test_an_order_of_minus_one_is_none() -> None:
    """compressed-tensors writes it where there was no order after all."""
    assert order_of(torch.full((8,), -1), 2).tolist() == list(range(8))
    assert order_of(torch.tensor([1, 0, 1, 0]), 2).tolist() == [1, 3, 0, 2]
