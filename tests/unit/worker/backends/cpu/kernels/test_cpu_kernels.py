"""The CPU's own kernels against the plain ones, and rows that must not harm each other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from penstock.catalog.kv_formats import INT8, KvFormat, kv_format
from penstock.worker.backends.cpu.kernels import loops as cpu_loops
from penstock.worker.backends.cpu.kernels import memory as cpu_memory
from penstock.worker.backends.cpu.kernels.cpu_kernels import CpuKernels, RmsNorm
from penstock.worker.backends.cpu.kernels.products import few_rows
from penstock.worker.kv.arena import BlockLayout, LayerGeometry
from penstock.worker.models.batch import GroupBatch, Span
from penstock.worker.models.kernels import reference
from penstock.worker.models.kernels.interface import Masking
from penstock.worker.models.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from penstock.worker.kv.layout.layer_blocks import LayerBlocks

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCKS, BLOCK_TOKENS = 64, 16


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


FORMATS = (kv_format("auto", "float32"), INT8)


def empty_blocks(heads: LayerGeometry, form: KvFormat) -> LayerBlocks:
    """Of the second of two layers, so that they do not lie at the beginning of anything."""
    layout = BlockLayout((LayerGeometry(1, 24, 8), heads), BLOCK_TOKENS, form)
    memory = torch.zeros(BLOCKS * layout.block_bytes, dtype=torch.uint8)
    return layout.views(memory)[1]


def filled(kv_heads: int, dim: int, form: KvFormat = FORMATS[0]) -> LayerBlocks:
    """Blocks in whose every place there is something."""
    blocks = empty_blocks(LayerGeometry(kv_heads, dim, dim), form)
    places = torch.arange(BLOCKS * BLOCK_TOKENS)
    keys, values = (random(len(places), kv_heads, dim, seed=seed) for seed in (5, 6))
    blocks.store(places // BLOCK_TOKENS, places % BLOCK_TOKENS, keys, values)
    return blocks


def span(context: int, count: int) -> Span:
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(context))
    return Span(0, count, context, order[: -(-context // BLOCK_TOKENS)])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize(("context", "count"), [(40, 8), (100, 99), (700, 130), (513, 1), (64, 64)])
def test_a_past_taken_in_pieces_gives_what_it_gives_whole(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    context: int,
    count: int,
    form: KvFormat,
) -> None:
    monkeypatch.setattr(cpu_memory, "_PAST_TOKENS", (96, 96))
    blocks = filled(kv_heads, 16, form)
    rows = random(count, heads, 16, seed=1)
    ours, plain = torch.empty_like(rows), torch.empty_like(rows)
    at = span(context, count)
    CpuKernels().chunk(rows, blocks, at, Masking(0.25), ours)
    ReferenceKernels().chunk(rows, blocks, at, Masking(0.25), plain)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [5, 24, 90])
def test_a_window_needs_only_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, window: int, softcap: float | None
) -> None:
    blocks = filled(2, 16)
    rows, at = random(37, 4, 16, seed=1), span(300, 37)
    masking = Masking(0.25, window=window, softcap=softcap)
    ours, whole = torch.empty_like(rows), torch.empty_like(rows)
    ReferenceKernels().chunk(rows, blocks, at, masking, ours)
    monkeypatch.setattr(reference, "first_seen", lambda *_: 0)
    monkeypatch.setattr(ReferenceKernels, "tile_scores", 1 << 30)
    ReferenceKernels().chunk(rows, blocks, at, masking, whole)
    torch.testing.assert_close(ours, whole, rtol=1e-5, atol=1e-6)


def decodes(count: int, context: int = 20) -> GroupBatch:
    """Rows of one sequence each; the n-th sees block n + 1 and the one after its last."""
    none = torch.zeros(0, dtype=torch.long)
    tables = torch.tensor([[n + 1, n + 1 + count] for n in range(count)], dtype=torch.int32)
    contexts = torch.full((count,), context, dtype=torch.int32)
    return GroupBatch(none, none, count, tables, contexts, chunks=())


def decoded(
    rows: torch.Tensor, blocks: LayerBlocks, masking: Masking, kernels: ReferenceKernels
) -> torch.Tensor:
    out = torch.zeros(*rows.shape[:2], blocks.dims[1])
    kernels.decode(rows, blocks, decodes(len(rows)), masking, out)
    return out


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize(
    "masking",
    [
        Masking(0.25),
        Masking(0.25, window=7),
        Masking(0.25, softcap=2.0),
        Masking(0.25, sinks=torch.tensor([0.5, -1.0, 2.0, 0.1])),
    ],
    ids=["plain", "window", "softcap", "sinks"],
)
def test_decodes_in_place_see_what_gathered_blocks_show(form: KvFormat, masking: Masking) -> None:
    blocks, rows = filled(2, 16, form), random(5, 4, 16, seed=1)
    ours = decoded(rows, blocks, masking, CpuKernels())
    plain = decoded(rows, blocks, masking, ReferenceKernels())
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def awkward(*shape: int) -> torch.Tensor:
    """Vectors of every size there is, of zeros, of equal halves, and such as are no numbers."""
    vectors = random(*shape, seed=3) * 10.0 ** (30 * random(*shape[:2], 1, seed=4)).clamp(-40, 38)
    vectors[0] = 0.0
    vectors[1] = 1e-38
    vectors[2] = torch.arange(shape[2]) - shape[2] / 2
    vectors[3, 0, 1] = float("nan")
    vectors[4, 1, 0] = float("inf")
    vectors[5, 0, 2] = -float("inf")
    vectors[6, 0] = 3.4e38
    return vectors


def test_what_is_stored_as_codes_is_the_same_by_all_kernels() -> None:
    """To the bit: what one has written another may read."""
    ours, plain = (empty_blocks(LayerGeometry(2, 24, 16), INT8) for _ in range(2))
    new = awkward(40, 2, 24), awkward(40, 2, 16)
    places = torch.randperm(BLOCKS * BLOCK_TOKENS, generator=torch.Generator().manual_seed(0))[:40]
    batch = replace(decodes(1), write_blocks=places // 16, write_slots=places % 16)
    CpuKernels().store(new, ours, batch)
    ReferenceKernels().store(new, plain, batch)
    for one, other in zip(ours.tensors, plain.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    wanted = torch.arange(BLOCKS).flip(0)
    loaded = CpuKernels().copied(ours, wanted, torch.float32)
    for one, other in zip(loaded, plain.load(wanted, torch.float32), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_a_number_harms_no_other(bad: float, form: KvFormat) -> None:
    blocks = filled(2, 16, form)
    rows, weight = random(5, 4, 16, seed=1), random(64, 64, seed=2)
    others = [0, 1, 3, 4]
    clean = decoded(rows, blocks, Masking(0.25), CpuKernels())
    product = few_rows(rows.view(5, 64), weight)
    norm = RmsNorm(torch.ones(64), 1e-6)
    normed = norm(rows.view(5, 64))
    # The third sequence's own tokens, too.
    spoilt_kv = torch.full((1, 2, 16), bad)
    one = torch.ones(1, dtype=torch.long)
    batch = replace(decodes(1), write_blocks=3 * one, write_slots=2 * one)
    CpuKernels().store((spoilt_kv, spoilt_kv), blocks, batch)
    sound = decoded(rows, blocks, Masking(0.25), CpuKernels())
    assert not np.isfinite(sound[2].numpy()).any(), "what was stored looks sound"
    assert torch.equal(sound[others], clean[others])
    rows[2] = bad
    spoilt = decoded(rows, blocks, Masking(0.25), CpuKernels())
    assert not np.isfinite(spoilt[2].numpy()).any(), "the spoilt row looks sound"
    assert torch.equal(spoilt[others], clean[others])
    spoilt = few_rows(rows.view(5, 64), weight)
    assert not np.isfinite(spoilt[2].numpy()).any(), "the spoilt row looks sound"
    assert torch.equal(spoilt[others], product[others])
    assert torch.equal(norm(rows.view(5, 64))[others], normed[others])


def test_the_compiler_may_not_assume_that_there_is_no_nan() -> None:
    assert not cpu_loops.OPTIONS["fastmath"] & {"nnan", "ninf", "fast"}


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize(
    "masking",
    [
        Masking(0.25),
        Masking(0.25, window=5),
        Masking(0.25, window=40, softcap=3.0),
        Masking(0.25, sinks=random(4, seed=7)),
    ],
)
def test_rows_of_drafts_share_a_pass_and_see_what_each_would_alone(
    form: KvFormat, masking: Masking
) -> None:
    """Three sequences with 1, 5 and 16 rows, whose last ones reach into further blocks."""
    blocks = filled(2, 16, form)
    counts, starts = (1, 5, 16), (20, 30, 100)
    firsts = np.cumsum((0, *counts)).astype(np.int32)
    total = int(firsts[-1])
    rows, tables = random(total, 4, 16, seed=1), torch.zeros((total, 8), dtype=torch.int32)
    contexts = torch.zeros(total, dtype=torch.int32)
    for number, (count, start) in enumerate(zip(counts, starts, strict=True)):
        own = slice(int(firsts[number]), int(firsts[number]) + count)
        tables[own] = torch.arange(1 + 8 * number, 9 + 8 * number, dtype=torch.int32)
        contexts[own] = torch.arange(start, start + count, dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.long)
    answers = []
    for shared in (torch.from_numpy(firsts), None):
        batch = GroupBatch(*(none,) * 2, total, tables, contexts, (), decode_firsts=shared)
        out = torch.full(rows.shape, float("nan"))
        CpuKernels().decode(rows, blocks, batch, masking, out)
        answers.append(out)
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-5, atol=1e-6)
    out = torch.empty(rows.shape)
    ReferenceKernels().decode(rows, blocks, batch, masking, out)
    torch.testing.assert_close(answers[0], out, rtol=1e-5, atol=1e-6)
