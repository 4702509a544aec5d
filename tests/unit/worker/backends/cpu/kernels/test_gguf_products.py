"""The CPU's kernels for GGUF blocks: the numbers and products of the plain torch code."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from penstock.testing.gguf_files import random_rows
from penstock.worker.backends.cpu.kernels import gguf_codes, gguf_products
from penstock.worker.models.linear.gguf_blocks import GGUF_WEIGHTS, GgufWeight

OUTPUTS, INPUTS = 36, 768


def weight_of(name: str, outputs: int = OUTPUTS) -> GgufWeight:
    kind = {kind.format.block.name: kind for kind in GGUF_WEIGHTS}[name]
    rows = torch.from_numpy(random_rows(name, outputs, INPUTS))
    weight = kind.read({"weight": rows}, torch.empty(8 * INPUTS))  # eight outputs a tile
    assert isinstance(weight, GgufWeight)
    return weight


@pytest.fixture(autouse=True)
def two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of the outputs that are not whole groups of four."""
    monkeypatch.setattr(numba, "get_num_threads", lambda: 2)


@pytest.mark.parametrize("name", gguf_codes.KINDS)
def test_numbers_are_the_same_to_the_last_bit(name: str) -> None:
    weight = weight_of(name)
    expected = weight.dequantised()
    some = torch.tensor([35, 0, 7])
    expected_rows = weight.rows(some)
    gguf_products.adopt(weight)
    assert weight.kernel is not None
    assert torch.equal(weight.dequantised(), expected)
    assert torch.equal(weight.rows(some), expected_rows)
    tile = torch.empty(5, INPUTS)
    weight.dequantise(30, 35, tile)
    assert torch.equal(tile, expected[30:35])


@pytest.mark.parametrize("count", [1, 2, 3, 8, 17, 49])
@pytest.mark.parametrize("name", gguf_codes.KINDS)
def test_products_are_those_of_the_numbers(name: str, count: int) -> None:
    weight = weight_of(name)
    numbers = weight.dequantised().double()
    gguf_products.adopt(weight)
    rows = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(count))
    expected = rows.double() @ numbers.t()
    wide = torch.full((count, OUTPUTS + 8), torch.nan)
    weight.multiply(rows, wide[:, 4:-4])  # beside others' outputs
    error = (wide[:, 4:-4] - expected).norm() / expected.norm()
    assert error < 1e-6
    assert wide[:, :4].isnan().all()
    assert wide[:, -4:].isnan().all()


def test_outputs_that_are_not_whole_groups_are_multiplied_by_tiles() -> None:
    weight = weight_of("Q8_0", outputs=7)
    expected = torch.ones(5, INPUTS) @ weight.dequantised().t()
    gguf_products.adopt(weight)
    torch.testing.assert_close(
        weight.product(torch.ones(5, INPUTS)), expected, rtol=1e-5, atol=1e-4
    )


def test_a_row_that_is_not_a_number_spoils_no_other() -> None:
    weight = weight_of("Q4_K")
    gguf_products.adopt(weight)
    rows = torch.randn(6, INPUTS, generator=torch.Generator().manual_seed(0))
    clean = weight.product(rows)
    rows[2, 5] = np.nan
    spoilt = weight.product(rows)
    others = [0, 1, 3, 4, 5]
    assert spoilt[2].isnan().all()
    assert torch.equal(spoilt[others], clean[others])


def test_types_without_a_kernel_stay_as_they_are() -> None:
    weight = weight_of("Q3_K")
    gguf_products.adopt(weight)
    assert weight.kernel is None
