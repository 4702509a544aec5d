"""KV on a GPU keeps its bytes, wherever its blocks go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from penstock.catalog.kv_formats import kv_format
from penstock.testing import tiny
from penstock.testing.exactness import Mode, run, start_engine
from penstock.worker.backends import open_backend
from penstock.worker.kv.arena import Arena, BlockLayout, LayerGeometry
from penstock.worker.kv.blocks import BlockPool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LAYOUT = BlockLayout(
    (LayerGeometry(8, 128, 128), LayerGeometry(4, 192, 64)), 16, kv_format("auto", "bfloat16")
)


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Of several extents, in each of which there are many blocks."""
    made = Arena(LAYOUT, 500, open_backend("cuda:0"), extent_bytes=8 << 20)
    yield made
    made.close()


def bytes_of(arena: Arena, blocks: list[int]) -> Tensor:
    """[blocks, bytes], on the device."""
    size = arena.layout.block_bytes
    return arena.range.tensor()[: arena.blocks * size].view(arena.blocks, size)[blocks]


def fill(arena: Arena, blocks: list[int]) -> None:
    """Every value that a byte can have, those that are no number among them."""
    size = arena.layout.block_bytes
    whole = arena.range.tensor()[: arena.blocks * size].view(arena.blocks, size)
    whole[blocks] = torch.randint(0, 256, (len(blocks), size), device="cuda").to(torch.uint8)


def test_blocks_come_back_from_the_host_as_they_were(arena: Arena) -> None:
    pool = BlockPool(arena.blocks, arena.extent_blocks, arena)
    blocks = pool.take(300)
    fill(arena, blocks)
    on_host = bytes_of(arena, blocks).cpu()
    pool.give(blocks)
    pool.return_empty_extents()  # other memory will stand behind the addresses
    again = pool.take(300)[::-1]
    size = arena.layout.block_bytes
    whole = arena.range.tensor()[: arena.blocks * size].view(arena.blocks, size)
    whole[again] = on_host.to("cuda")
    assert torch.equal(bytes_of(arena, again).cpu(), on_host)


def test_moved_blocks_are_the_same_bytes(arena: Arena) -> None:
    pool = BlockPool(arena.blocks, arena.extent_blocks, arena)
    blocks = pool.take(480)
    kept = blocks[::7]
    pool.give([block for block in blocks if block not in set(kept)])
    fill(arena, kept)
    before = bytes_of(arena, kept).cpu()
    held = arena.committed_bytes
    moves = pool.compact()
    assert moves
    arena.copy(moves)
    assert pool.return_empty_extents() > 0
    assert arena.committed_bytes < held
    pool.check()
    assert torch.equal(bytes_of(arena, [moves.get(b, b) for b in kept]).cpu(), before)


def test_keys_and_values_read_what_was_written(arena: Arena) -> None:
    BlockPool(arena.blocks, arena.extent_blocks, arena).take(40)
    views = [view for layer in arena.layers for view in layer.tensors]
    written = [torch.randn_like(view[:40]) for view in views]
    for view, values in zip(views, written, strict=True):
        view[:40] = values
    for view, values in zip(views, written, strict=True):
        assert torch.equal(view[:40], values)


def test_an_answer_is_the_same_when_its_blocks_move_half_way(tmp_path: Path) -> None:
    folder = tiny.save("qwen3", tmp_path)
    mode = Mode("moving", step_tokens=64)
    prompts = [tiny.prompt(length, length) for length in (40, 65, 130)]
    wanted = run(start_engine(folder, mode, device="cuda:0"), prompts, 24)
    engine = start_engine(folder, mode, device="cuda:0")
    step = engine.step

    def moving() -> list[object]:
        outputs = step()
        engine.shed(0)
        return list(outputs)

    engine.step = moving  # type: ignore[method-assign, assignment]
    assert run(engine, prompts, 24) == wanted
