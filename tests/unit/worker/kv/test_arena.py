"""The arena: where a block's values lie, and that memory comes and goes with the extents."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from penstock.catalog.kv_formats import INT8, KvFormat, kv_format
from penstock.worker.backends.cpu import CpuBackend
from penstock.worker.kv.arena import Arena, BlockLayout, LayerGeometry
from penstock.worker.kv.blocks import BlockPool

# Layers of different widths, and keys wider than values.
LAYERS = (LayerGeometry(2, 8, 8), LayerGeometry(1, 16, 4), LayerGeometry(4, 8, 8))
FLOAT32 = kv_format("auto", "float32")
LAYOUT = BlockLayout(LAYERS, block_tokens=4, format=FLOAT32)
CPU = CpuBackend()


def open_arena(blocks: int = 6, layout: BlockLayout = LAYOUT) -> tuple[Arena, BlockPool]:
    arena = Arena(layout, blocks, CPU)
    pool = BlockPool(blocks, arena.extent_blocks, arena)
    return arena, pool


def views(arena: Arena) -> list[torch.Tensor]:
    return [view for layer in arena.layers for view in layer.tensors]


@pytest.mark.parametrize("form", [FLOAT32, INT8], ids=lambda form: form.name)
def test_every_value_of_every_layer_has_a_place_of_its_own(form: KvFormat) -> None:
    layout = BlockLayout(LAYERS, block_tokens=4, format=form)
    arena, pool = open_arena(layout=layout)
    pool.take(5)
    for number, view in enumerate(views(arena)):
        view.fill_(number)
    for number, view in enumerate(views(arena)):
        assert bool((view == number).all()), "two views overlap"
    held = sum(view.numel() * view.itemsize for view in views(arena))
    unused = 6 * layout.block_bytes - held
    # Some, so that whole blocks soon are whole pages.
    assert 0 <= unused <= (held // 64 if form.scaled else 0)
    shapes = [tuple(layer.keys.shape) for layer in arena.layers]
    assert shapes == [(6, 4, 2, 8), (6, 4, 1, 16), (6, 4, 4, 8)]
    assert tuple(arena.layers[1].values.shape) == (6, 4, 1, 4)
    for layer in arena.layers:
        scales = layer.scales or ()
        assert [tuple(part.shape) for part in scales] == [tuple(layer.keys.shape[:3])] * len(scales)
        assert bool(scales) == form.scaled


def test_one_copy_of_a_blocks_bytes_moves_all_layers() -> None:
    arena, pool = open_arena()
    pool.take(5)
    for view in views(arena):
        view.copy_(torch.randn(view.shape))
    before = [view[2].clone() for view in views(arena)]
    untouched = [view[[0, 1, 3, 5]].clone() for view in views(arena)]
    size = LAYOUT.block_bytes
    memory = arena.range.tensor()
    memory[4 * size : 5 * size] = memory[2 * size : 3 * size]
    assert all(torch.equal(view[4], old) for view, old in zip(views(arena), before, strict=True))
    assert all(
        torch.equal(view[[0, 1, 3, 5]], old)
        for view, old in zip(views(arena), untouched, strict=True)
    )


@pytest.mark.parametrize("form", [FLOAT32, kv_format("auto", "bfloat16"), INT8])
@pytest.mark.parametrize("heads", [1, 3, 5])
def test_extents_are_whole_blocks_and_whole_pages(form: KvFormat, heads: int) -> None:
    layout = BlockLayout((LayerGeometry(heads, 24, 24),) * 5, block_tokens=16, format=form)
    arena = Arena(layout, 10_000, CPU)
    assert arena.extent_blocks * layout.block_bytes % 4096 == 0
    assert arena.extent_blocks * layout.block_bytes <= CPU.extent_bytes
    arena.close()


def wide_arena() -> tuple[Arena, BlockPool]:
    """Three extents and a bit."""
    layout = BlockLayout((LayerGeometry(8, 128, 128),) * 8, block_tokens=16, format=FLOAT32)
    blocks = 3 * CPU.extent_bytes // layout.block_bytes + 5
    return open_arena(blocks, layout)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_comes_with_use_and_goes_with_the_extent() -> None:
    start = resident_bytes()
    arena, pool = wide_arena()
    blocks = pool.take(pool.free)  # resident when committed, before anyone writes
    full = resident_bytes()
    assert full - start > 3 * CPU.extent_bytes - (8 << 20)
    assert arena.committed_bytes >= 3 * CPU.extent_bytes
    pool.give(blocks)
    assert pool.return_empty_extents() == 3
    assert full - resident_bytes() > 2 * CPU.extent_bytes
    assert arena.committed_bytes == CPU.extent_bytes
    arena.close()


def test_a_returned_extent_comes_back_at_the_same_place_and_empty() -> None:
    arena, pool = wide_arena()
    address = arena.layers[0].keys.data_ptr()
    blocks = pool.take(pool.free)
    arena.layers[-1].keys.fill_(7.0)
    pool.give(blocks)
    pool.return_empty_extents()
    pool.take(pool.free)
    assert arena.layers[0].keys.data_ptr() == address
    last = arena.blocks - 1
    assert float(arena.layers[-1].keys[last].abs().max()) == 0.0
    assert float(arena.layers[-1].keys[1].min()) == 7.0  # extent 0 is never returned
    arena.close()


def test_every_block_the_pool_hands_out_can_be_read_and_written() -> None:
    """Memory without access rights would end the process here, so surviving it is the proof."""
    arena, pool = wide_arena()
    per_extent = arena.extent_blocks
    first = pool.take(per_extent - 1)
    second = pool.take(per_extent)
    third = pool.take(per_extent)
    pool.give(second)
    pool.return_empty_extents()  # a hole between two extents in use
    fourth = pool.take(2)
    for block in (*first, *third, *fourth):
        for view in views(arena):
            view[block] += 1.0
    pool.check()
    arena.close()


def test_copied_blocks_keep_every_layers_values() -> None:
    arena, pool = open_arena()
    pool.take(5)
    for view in views(arena):
        view.copy_(torch.randn(view.shape))
    before = [view.clone() for view in views(arena)]
    arena.copy({4: 1, 5: 2})
    for view, old in zip(views(arena), before, strict=True):
        assert torch.equal(view[1], old[4]) and torch.equal(view[2], old[5])
        assert torch.equal(view[3:], old[3:])


def test_a_commit_beyond_the_limit_of_the_process_fails_and_changes_nothing() -> None:
    arena, pool = wide_arena()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    before = arena.committed_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (CPU.extent_bytes // 2, hard))
    try:
        with pytest.raises(torch.OutOfMemoryError):
            pool.take(pool.free)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert arena.committed_bytes == before
    pool.check()
    pool.take(pool.free)
    arena.close()
