"""What vectors are rounded to when KV is kept in 8 bits."""

from __future__ import annotations

import math

import pytest
import torch

from penstock.catalog.kv_formats import INT8, kv_format
from penstock.worker.kv.arena import BlockLayout, LayerGeometry
from penstock.worker.kv.layout.rounding import MOST, restored, rounded


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [1e-25, 1e-6, 1.0, 1e6, 1e36])
def test_no_number_is_off_by_more_than_half_a_step(size: float) -> None:
    """Of vectors of any size that float32 has; where the scale was rounded down, the largest too"""
    vectors = size * random(200, 3, 64)
    codes, scales = rounded(vectors)
    steps = scales.float()[..., None]
    assert float(((restored(codes, scales, torch.float32) - vectors).abs() / steps).max()) < 0.51
    assert int(codes.abs().max()) == MOST
    # A step is as small as 8 bits allow.
    assert float((steps[..., 0] * MOST / vectors.abs().amax(dim=-1)).max()) < 1.005


def test_a_vector_is_rounded_by_itself() -> None:
    vectors = random(50, 4, 32)
    codes, scales = rounded(vectors)
    for row in range(50):
        alone = rounded(vectors[row : row + 1, 2:3])
        assert torch.equal(alone[0][0, 0], codes[row, 2])
        assert torch.equal(alone[1][0, 0], scales[row, 2])


def test_what_was_rounded_is_rounded_to_itself() -> None:
    once = restored(*rounded(random(100, 2, 64)), torch.float32)
    again = restored(*rounded(once), torch.float32)
    torch.testing.assert_close(again, once, rtol=1e-2, atol=0)


def test_zeros_stay_zeros_and_what_is_no_number_stays_none() -> None:
    vectors = random(4, 8)
    vectors[0] = 0.0
    vectors[1, 3] = float("nan")
    vectors[2, 5] = float("inf")
    found = restored(*rounded(vectors), torch.float32)
    assert torch.equal(found[0], vectors[0])
    assert bool(found[1:3].isnan().all())
    assert bool(found[3].isfinite().all())


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [1, 8])
def test_nearly_twice_the_tokens_of_bfloat16_are_in_the_same_bytes(dim: int, heads: int) -> None:
    layers = (LayerGeometry(heads, dim, dim),) * 4
    sizes = {
        form.name: BlockLayout(layers, 16, form).block_bytes
        for form in (INT8, kv_format("auto", "bfloat16"), kv_format("auto", "float32"))
    }
    assert sizes["bfloat16"] >= 1.9 * sizes["int8"]
    assert sizes["float32"] >= 3.8 * sizes["int8"]


GPU_PAGE = 2 << 20


@pytest.mark.parametrize("layers", [30, 36, 48, 62])
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (8, 128), (4, 128), (16, 128), (8, 80)])
def test_blocks_soon_fill_whole_pages_of_a_gpu(layers: int, heads: int, dim: int) -> None:
    """What is committed at once: a piece of whole blocks and whole pages."""
    layout = BlockLayout((LayerGeometry(heads, dim, dim),) * layers, 16, INT8)
    piece = math.lcm(layout.block_bytes, GPU_PAGE)
    assert piece < 100 * GPU_PAGE
    exact = 16 * sum(layer.size_bytes(INT8) for layer in layout.layers)
    assert math.lcm(exact, GPU_PAGE) > 2 * piece  # so it is worth what it takes
