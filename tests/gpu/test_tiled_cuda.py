"""Products with packed weights by their codes: every coding, odd shapes, against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from penstock.worker.models.linear import PackedWeight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
if torch.cuda.is_available():
    from penstock.worker.backends.cuda.kernels.packed import tiling
    from penstock.worker.backends.cuda.kernels.packed.tiled import TiledWeight, Workspace
    from penstock.worker.models.linear.block_fp8 import BlockFp8Weight
    from penstock.worker.models.linear.gguf_blocks import GGUF_WEIGHTS
    from penstock.worker.models.linear.grouped import (
        E2m1Weight,
        Fp8Weight,
        Int4Weight,
        Int8Weight,
    )

CODINGS = (
    *("fp8-block", "fp8", "mxfp8", "int8", "int8-zeros", "mxfp4", "q4_k"),
    *("int4-128", "int4-64", "int4-32", "int4-0", "int4-128-zeros", "int4-32-zeros"),
    "int4-128-order",
)
SHAPES = ((200, 512), (72, 256), (1152, 768))
ROWS = (3, 16, 300, 100)
SEVERAL = ("fp8-block", "int8", "mxfp4", "q4_k", "int4-128")


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda:0")


def _scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda:0") + 0.5


def _fp8(*shape: int) -> torch.Tensor:
    codes = _bytes(*shape)
    codes[(codes & 127) == 127] = 3
    return codes.view(torch.float8_e4m3fn)


def _exponents(*shape: int) -> torch.Tensor:
    found = torch.randint(120, 132, shape, dtype=torch.uint8, device="cuda:0")
    return found.view(torch.float8_e8m0fnu)


def _weight(coding: str, outputs: int, inputs: int, scratch: torch.Tensor) -> PackedWeight:
    if coding == "fp8-block":
        scales = _scales(-(-outputs // 128), -(-inputs // 128))
        return BlockFp8Weight(_fp8(outputs, inputs), scales, scratch)
    if coding == "fp8":
        return Fp8Weight(_fp8(outputs, inputs), _scales(outputs, 1), scratch)
    if coding == "mxfp8":
        return Fp8Weight(_fp8(outputs, inputs), _exponents(outputs, inputs // 32), scratch)
    if coding == "int8":
        codes = _bytes(outputs, inputs).view(torch.int8)
        return Int8Weight(codes, _scales(outputs, 1), scratch)
    if coding == "int8-zeros":
        shape = (outputs, inputs // 64)
        zeros = torch.randint(-128, 129, shape, dtype=torch.int16, device="cuda:0")
        codes = _bytes(outputs, inputs).view(torch.int8)
        return Int8Weight(codes, _scales(*shape).half(), scratch, zeros=zeros)
    if coding == "mxfp4":
        scales = _exponents(outputs, inputs // 32)
        return E2m1Weight(_bytes(outputs, inputs // 2), scales, scratch)
    if coding == "q4_k":
        blocks = _bytes(outputs, inputs // 256, 144)
        steps = (_scales(outputs, inputs // 256, 2) / 10).half()
        blocks[:, :, :4] = steps.view(torch.uint8)
        (kind,) = (kind for kind in GGUF_WEIGHTS if kind.format.block.name == "Q4_K")
        return kind(blocks.flatten(1), scratch)
    return _int4(coding, outputs, inputs, scratch)


def _int4(coding: str, outputs: int, inputs: int, scratch: torch.Tensor) -> PackedWeight:
    group = int(coding.split("-")[1]) or inputs
    shape, others = (outputs, inputs // group), {}
    if "zeros" in coding:
        others["zeros"] = torch.randint(0, 17, shape, dtype=torch.uint8, device="cuda:0")
    if "order" in coding:
        others["order"] = torch.randperm(inputs, device="cuda:0").int()
    scales = _scales(*shape)
    scales = scales if group == inputs else scales.to(torch.float16 if others else torch.bfloat16)
    return Int4Weight(_bytes(outputs, inputs // 2), scales, scratch, **others)


def _made(
    coding: str, outputs: int, inputs: int, dtype: torch.dtype
) -> tuple[TiledWeight, torch.Tensor]:
    """A weight, and its numbers in float32."""
    torch.manual_seed(0)
    scratch = torch.empty(100 * inputs, dtype=dtype, device="cuda:0")
    packed = _weight(coding, outputs, inputs, scratch)
    workspace = Workspace(scratch.device, 4096, 1 << 23)
    weight = tiling.tiled(packed, workspace)
    assert weight is not None
    packed.scratch = torch.empty(1 << 20, device="cuda:0")
    return weight, packed.dequantised()


@pytest.mark.parametrize("coding", CODINGS)
def test_products_equal_those_of_the_numbers(coding: str) -> None:
    for outputs, inputs in SHAPES:
        weight, numbers = _made(coding, outputs, inputs, torch.bfloat16)
        found = torch.empty(outputs, inputs, device="cuda:0")
        weight.dequantise(0, outputs, found)
        order = weight.planes.order
        assert torch.equal(found, numbers if order is None else numbers[:, order.long()])
        for count in ROWS if coding in SEVERAL else ROWS[:3]:
            _check(weight, numbers, count)


@pytest.mark.parametrize("coding", SEVERAL)
def test_float16_rows(coding: str) -> None:
    weight, numbers = _made(coding, 200, 512, torch.float16)
    for count in (2, 300):
        _check(weight, numbers, count, 64)


@pytest.mark.parametrize("coding", ["fp8-block", "int4-128-zeros"])
def test_bias_and_what_is_added(coding: str) -> None:
    weight, numbers = _made(coding, 1152, 768, torch.bfloat16)
    for count in (1, 20, 300):
        rows = torch.randn(count, 768, device="cuda:0").to(torch.bfloat16)
        exact = rows.double() @ numbers.double().t()
        bias = torch.randn(1152, device="cuda:0").to(torch.bfloat16)
        _near(weight.product(rows, bias), exact + bias.double(), torch.bfloat16)
        added = (100 * torch.randn_like(exact)).to(torch.bfloat16)
        out = added.clone()
        weight.multiply_add(rows, out)
        _near(out, exact + added.double(), torch.bfloat16)


def _check(weight: TiledWeight, numbers: torch.Tensor, count: int, divisor: int = 1) -> None:
    rows = torch.randn(count, numbers.shape[1], device="cuda:0").to(weight.dtype) / divisor
    out = torch.empty(count, len(numbers), dtype=weight.dtype, device="cuda:0")
    weight.multiply(rows, out)
    _near(out, rows.double() @ numbers.double().t(), weight.dtype)
    assert not weight.workspace.arrivals.any()


@pytest.mark.parametrize("coding", ["fp8-block", "int4-128", "int4-128-zeros", "q4_k"])
def test_norm_and_gate_are_part_of_a_row_s_product(coding: str) -> None:
    weight, numbers = _made(coding, 1024, 768, torch.bfloat16)
    row = torch.randn(1, 768, device="cuda:0").to(torch.bfloat16)
    norm = (torch.rand(768, device="cuda:0") + 0.5).to(torch.bfloat16)
    normed = torch.nn.functional.rms_norm(row.float(), (768,), norm.float(), 1e-6)
    gate, up = (normed.to(torch.bfloat16).double() @ numbers.double().t()).chunk(2, dim=1)
    exact = torch.nn.functional.silu(gate) * up
    for early in (False, True):
        out = torch.empty(1, 512, dtype=torch.bfloat16, device="cuda:0")
        weight.few_rows(row, out, norm=(norm, 1e-6), gated=True, early=early)
        _near(out, exact, torch.bfloat16)


def _near(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - exact).norm() / exact.norm()
    assert error < (6e-3 if dtype == torch.bfloat16 else 1e-3)
