"""The CPU's own kernels against the plain ones, and rows that must not harm each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.worker.engine.batch import Batch, Span
from penstock.worker.models.kernels import cpu_loops, cpu_memory, reference
from penstock.worker.models.kernels.cpu import CpuKernels, RmsNorm, few_rows
from penstock.worker.models.kernels.interface import Masking
from penstock.worker.models.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCKS, BLOCK_TOKENS = 64, 16


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def arena(kv_heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as the arena has them: two views of one block-major storage."""
    flat = random(BLOCKS, 2, BLOCK_TOKENS, kv_heads, dim)
    return flat[:, 0], flat[:, 1]


def span(context: int, count: int) -> Span:
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(context))
    return Span(0, count, context, order[: -(-context // BLOCK_TOKENS)])


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize(("context", "count"), [(40, 8), (100, 99), (700, 130), (513, 1), (64, 64)])
def test_a_past_taken_in_pieces_gives_what_it_gives_whole(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, context: int, count: int
) -> None:
    monkeypatch.setattr(cpu_memory, "_PAST_TOKENS", (96, 96))
    keys, values = arena(kv_heads, 16)
    rows = random(count, heads, 16, seed=1)
    ours, plain = torch.empty_like(rows), torch.empty_like(rows)
    at = span(context, count)
    CpuKernels().chunk(rows, keys, values, at, Masking(0.25), ours)
    ReferenceKernels().chunk(rows, keys, values, at, Masking(0.25), plain)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [5, 24, 90])
def test_a_window_needs_only_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, window: int, softcap: float | None
) -> None:
    keys, values = arena(2, 16)
    rows, at = random(37, 4, 16, seed=1), span(300, 37)
    masking = Masking(0.25, window=window, softcap=softcap)
    ours, whole = torch.empty_like(rows), torch.empty_like(rows)
    ReferenceKernels().chunk(rows, keys, values, at, masking, ours)
    monkeypatch.setattr(reference, "first_seen", lambda *_: 0)
    monkeypatch.setitem(reference._TILE_SCORES, "cpu", 1 << 30)
    ReferenceKernels().chunk(rows, keys, values, at, masking, whole)
    torch.testing.assert_close(ours, whole, rtol=1e-5, atol=1e-6)


def decoded(rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Rows of one sequence each; the n-th sees block n + 1 and the one after its last."""
    count, none = rows.shape[0], torch.zeros(0, dtype=torch.long)
    tables = torch.tensor([[n + 1, n + 1 + count] for n in range(count)], dtype=torch.int32)
    batch = Batch(
        *(none,) * 5,
        decodes=count,
        decode_tables=tables,
        decode_contexts=torch.full((count,), 20, dtype=torch.int32),
        chunks=(),
    )
    out = torch.zeros(rows.shape)
    CpuKernels().decode(rows, keys, values, batch, Masking(0.25), out)
    return out


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_a_number_harms_no_other(bad: float) -> None:
    keys, values = arena(2, 16)
    rows, weight = random(5, 4, 16, seed=1), random(64, 64, seed=2)
    others = [0, 1, 3, 4]
    clean = decoded(rows, keys, values)
    product = few_rows(rows.view(5, 64), weight)
    norm = RmsNorm(torch.ones(64), 1e-6)
    normed = norm(rows.view(5, 64))
    rows[2], keys[3], values[3 + 5] = bad, bad, bad  # the third sequence, its own blocks too
    spoilt = decoded(rows, keys, values)
    assert not np.isfinite(spoilt[2].numpy()).any(), "the spoilt row looks sound"
    assert torch.equal(spoilt[others], clean[others])
    spoilt = few_rows(rows.view(5, 64), weight)
    assert not np.isfinite(spoilt[2].numpy()).any(), "the spoilt row looks sound"
    assert torch.equal(spoilt[others], product[others])
    assert torch.equal(norm(rows.view(5, 64))[others], normed[others])


def test_the_compiler_may_not_assume_that_there_is_no_nan() -> None:
    assert not cpu_loops._OPTIONS["fastmath"] & {"nnan", "ninf", "fast"}
