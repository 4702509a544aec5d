"""How packed weights lie and are shared out on a GPU, as far as that needs none."""

from __future__ import annotations

import pytest
import torch

from penstock.worker.backends.cuda.kernels.packed.tiles import (
    MOST_ROWS,
    choose_cuts,
    choose_tile,
    padded_rows,
)
from penstock.worker.models.linear import PackedWeight, tile_outputs
from penstock.worker.models.linear.block_fp8 import BlockFp8Weight
from penstock.worker.models.linear.grouped import Int4Weight, Int8Weight

SCRATCH = torch.empty(1 << 16, dtype=torch.bfloat16)


def test_weights_are_cut_until_there_are_programs_for_every_place() -> None:
    # Of an 8B model: queries, keys and values; what attention leaves; gate and up; down.
    shapes = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
    cuts = [choose_cuts(outputs, inputs // 128) for outputs, inputs in shapes]
    assert cuts == [4, 8, 2, 8]
    assert choose_cuts(151936, 32) == 1
    assert choose_cuts(64, 3) == 1  # too few inputs for two


def test_every_number_of_rows_that_codes_are_multiplied_with_has_a_tile() -> None:
    for rows in range(1, MOST_ROWS + 1):
        padded = padded_rows(rows)
        assert rows <= padded <= max(8, 2 * rows)
        for codes_of_word in (2, 4):
            for mins in (False, True):
                tile = choose_tile(padded, codes_of_word, mins)
                # Tiles of weights with scales of blocks of 128 outputs lie in one block.
                assert 128 % tile.outputs == 0
                # Sums fit the registers of a program's threads.
                assert padded * tile.outputs // (32 * tile.warps) <= 64


def test_tiles_of_many_outputs_are_whole_multiples() -> None:
    assert tile_outputs(8 << 20, 3072) == 2688  # of 2730
    assert tile_outputs(100 * 50, 100) == 50
    assert tile_outputs(10, 100) == 1


def _unpacked(words: torch.Tensor, span: int, parts: int) -> torch.Tensor:
    """Codes [outputs, inputs] of words: each has those of inputs `span` / `parts` apart."""
    bits = 16 // parts
    of_spans = torch.unflatten(words.int(), 1, (-1, 1, span // parts))
    shifts = bits * torch.arange(parts)[:, None]
    return ((of_spans >> shifts) & ((1 << bits) - 1)).flatten(1)


def _weights() -> list[tuple[PackedWeight, torch.Tensor]]:
    """Weights, and their codes one by one."""
    chance = torch.Generator().manual_seed(0)
    packed = torch.randint(256, (200, 256), generator=chance).byte()
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    groups = torch.rand(200, 4, generator=chance).bfloat16()
    blocks = torch.rand(2, 2, generator=chance)
    whole = torch.rand(200, 1, generator=chance)
    return [
        (Int4Weight(packed, groups, SCRATCH), nibbles),
        (Int8Weight(packed.view(torch.int8), whole, SCRATCH), packed),
        (BlockFp8Weight(packed.view(torch.float8_e4m3fn), blocks, SCRATCH), packed),
    ]


@pytest.mark.parametrize("index", range(3))
def test_codes_and_scales_are_brought_into_the_layout_of_kernels(index: int) -> None:
    pytest.importorskip("triton")
    from penstock.worker.backends.cuda.kernels.packed.tiled import Workspace
    from penstock.worker.backends.cuda.kernels.packed.tiling import tiled

    packed, codes = _weights()[index]
    workspace = Workspace(torch.device("cpu"))
    weight = tiled(packed, workspace)
    assert weight is not None
    assert weight.shape == packed.shape
    parts = weight.coding.codes_of_word
    assert torch.equal(_unpacked(weight.planes.codes, weight.coding.span, parts), codes.int())
    of = packed.scales
    plane = weight.planes.more if weight.coding.whole else weight.planes.scales
    assert plane is not None
    assert torch.equal(plane.t().contiguous().view(of.dtype), of)
    # As many bytes as before, and counted.
    assert sum(b.nbytes for b in weight.buffers()) == sum(b.nbytes for b in packed.buffers())


def test_weights_of_other_layouts_and_float32_rows_are_left_to_torch() -> None:
    pytest.importorskip("triton")
    from penstock.worker.backends.cuda.kernels.packed.tiled import Workspace
    from penstock.worker.backends.cuda.kernels.packed.tiling import tiled

    workspace = Workspace(torch.device("cpu"))
    codes, scales = torch.zeros(8, 36, dtype=torch.uint8), torch.ones(8, 1)
    assert tiled(Int4Weight(codes, scales, SCRATCH), workspace) is None  # 72 inputs
    packed, _ = _weights()[0]
    packed.scratch = SCRATCH.float()
    assert tiled(packed, workspace) is None
