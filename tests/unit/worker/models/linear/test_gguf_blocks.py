"""Blocks of every GGUF type: the numbers are those of gguf's own reader, to the last bit."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from penstock.worker.models.linear.gguf_blocks import GGUF_WEIGHTS, GgufWeight

OUTPUTS, BLOCKS = 7, 5
# Where each type has float16 numbers: random bits there would be NaN or infinite at times.
SCALES: dict[str, tuple[int, ...]] = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}


def random_rows(name: str, outputs: int = OUTPUTS, blocks: int = BLOCKS) -> np.ndarray[Any, Any]:
    block = next(kind for kind in GGUF_WEIGHTS if kind.format.block.name == name).format.block
    chance = np.random.default_rng(3)
    elements = blocks * (256 // block.elements)
    rows = chance.integers(0, 256, (outputs * elements, block.size_bytes), dtype=np.uint8)
    if block.elements == 1:
        kind = np.float16 if name == "F16" else np.float32
        numbers = chance.standard_normal(len(rows)).astype(kind)
        rows[:] = numbers.view(np.uint8).reshape(len(rows), -1)[:, -2:]
    for at in SCALES.get(name, (0,) if block.elements > 1 else ()):
        scales = chance.standard_normal(len(rows)).astype(np.float16)
        rows[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return rows.reshape(outputs, -1)


def weight_of(kind: type[GgufWeight], scratch: int = 1 << 16) -> GgufWeight:
    rows = torch.from_numpy(random_rows(kind.format.block.name))
    return kind.read({"weight": rows}, torch.empty(scratch))


@pytest.mark.parametrize("kind", GGUF_WEIGHTS, ids=lambda kind: kind.format.name)
def test_numbers_equal_gguf_to_the_last_bit(kind: type[GgufWeight]) -> None:
    weight = weight_of(kind)
    name = kind.format.block.name
    wanted = gguf.quants.dequantize(random_rows(name), gguf.GGMLQuantizationType[name])
    assert np.isfinite(wanted).all()
    assert weight.shape == wanted.shape == (OUTPUTS, BLOCKS * 256)
    np.testing.assert_array_equal(weight.dequantised().numpy(), wanted)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert size == (kind.format.block.elements, kind.format.block.size_bytes)


@pytest.mark.parametrize("kind", GGUF_WEIGHTS, ids=lambda kind: kind.format.name)
def test_products_and_rows_are_those_of_the_numbers(kind: type[GgufWeight]) -> None:
    weight = weight_of(kind, scratch=2 * BLOCKS * 256)  # two outputs a tile
    numbers = weight.dequantised()
    rows = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(weight.product(rows), rows @ numbers.t(), rtol=1e-5, atol=1e-3)
    wanted = torch.tensor([5, 0, 5])
    assert torch.equal(weight.rows(wanted), numbers[wanted])
    joined = kind.joined([weight, weight])
    assert joined is not None
    assert torch.equal(joined.view(OUTPUTS, 2 * OUTPUTS).dequantised(), numbers)
