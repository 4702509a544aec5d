"""Triton's attention, layer parts, experts and nucleus against plain torch in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from penstock.worker.models.kernels import reference
from penstock.worker.models.kernels.interface import Masking

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BLOCK = 16
DEVICE = "cuda:0"
LIMIT = {torch.bfloat16: 8e-3, torch.float32: 2e-5}


@dataclass(frozen=True)
class Heads:
    queries: int
    kv: int
    key_dim: int
    value_dim: int


SHAPES = [
    Heads(32, 8, 128, 128),
    Heads(32, 8, 64, 64),
    Heads(16, 16, 192, 128),
    Heads(8, 4, 256, 256),
    Heads(20, 4, 80, 80),
]
MASKS = [{}, {"window": 50}, {"softcap": 20.0}, {"sinks": True}]


def arena_views(heads: Heads, blocks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one layer, laid out as the arena does."""
    key, value = (BLOCK * heads.kv * dim for dim in (heads.key_dim, heads.value_dim))
    flat = torch.randn(blocks * (key + value), device=DEVICE).to(dtype)
    keys, values = (
        flat.as_strided(
            (blocks, BLOCK, heads.kv, dim), (key + value, heads.kv * dim, dim, 1), offset
        )
        for dim, offset in ((heads.key_dim, 0), (heads.value_dim, key))
    )
    return keys, values


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_attention_of_any_mixture(dtype: torch.dtype, heads: Heads, mask: dict[str, float]) -> None:
    from penstock.wire import Sampling, Submit
    from penstock.worker.engine.paged_batch import Cut, Inputs, Room, describe
    from penstock.worker.models.kernels.cuda import CudaKernels
    from penstock.worker.models.kernels.paging import chunk_tiling, decode_tiling
    from penstock.worker.scheduling.plan import Plan, Slice
    from penstock.worker.scheduling.sequence import Sequence

    torch.backends.cuda.matmul.allow_tf32 = False
    chance = random.Random(str((dtype, heads, mask)))
    spans = [(n - 1, 1) for n in (1, 17, 300, 2000)] + [(0, 7), (0, 130), (333, 65)]
    blocks = list(range(1, 1 + sum(-(-(start + count) // BLOCK) for start, count in spans)))
    chance.shuffle(blocks)
    total = len(blocks) + 1
    plan, tables = Plan(), []
    for number, (start, count) in enumerate(spans):
        sequence = Sequence(Submit(number, [0] * (start + count), 9, Sampling()), number)
        sequence.blocks = [blocks.pop() for _ in range(-(-(start + count) // BLOCK))]
        tables.append(torch.tensor(sequence.blocks, device=DEVICE))
        (plan.decodes if count == 1 else plan.chunks).append(Slice(sequence, start, count))
    width = max(heads.key_dim, heads.value_dim)
    columns = decode_tiling(width, dtype, 4).columns
    cut = Cut(BLOCK, columns, 9, chunk_tiling(width, dtype).rows)
    batch = Inputs(torch.device(DEVICE), Room(1, 1, 1, 1, 0, 1), 8).bring(describe(plan, {}, cut))
    keys, values = arena_views(heads, total, dtype)
    rows = torch.randn(plan.tokens, heads.queries, heads.key_dim, device=DEVICE).to(dtype)
    new = (
        torch.randn(plan.tokens, heads.kv, heads.key_dim, device=DEVICE).to(dtype),
        torch.randn(plan.tokens, heads.kv, heads.value_dim, device=DEVICE).to(dtype),
    )
    sinks = torch.randn(heads.queries, device=DEVICE).to(dtype) if mask.get("sinks") else None
    window = int(mask["window"]) if "window" in mask else None
    masking = Masking(heads.key_dim**-0.5, window, mask.get("softcap"), sinks)
    kernels = CudaKernels()
    kernels.prepare(torch.device(DEVICE), 64, 8)
    ours = kernels.attend(rows, new, (keys, values), batch, masking)
    exact = Masking(
        masking.scale, window, masking.softcap, sinks.double() if sinks is not None else None
    )
    row = 0
    for table, (start, count) in zip(tables, spans, strict=True):
        end = start + count
        seen_keys, seen_values = (
            part[table].flatten(0, 1)[:end].double() for part in (keys, values)
        )
        assert torch.equal(seen_keys[start:], new[0][row : row + count].double())
        wanted = reference.attend(rows[row : row + count].double(), seen_keys, seen_values, exact)
        error = (ours[row : row + count].double() - wanted).norm() / wanted.norm()
        assert error < LIMIT[dtype]
        row += count


@pytest.mark.parametrize("dtype", LIMIT)
def test_one_row_products(dtype: torch.dtype) -> None:
    from penstock.worker.models.kernels import triton_layer

    for out, width in ((6144, 4096), (4096, 12288), (300, 1000)):
        weight = (torch.randn(out, width, device=DEVICE) / width**0.5).to(dtype)
        row, norm, residual = (
            torch.randn(1, n, device=DEVICE).to(dtype) for n in (width, width, out)
        )
        exact = row.double()
        normed = exact * torch.rsqrt((exact**2).mean() + 1e-6) * norm.double()
        wanted = normed @ weight.double().T
        ours = triton_layer.one_row(row, weight, norm=norm[0], epsilon=1e-6)
        assert (ours.double() - wanted).norm() / wanted.norm() < LIMIT[dtype]
        gate, up = wanted.chunk(2, dim=1)
        gated = triton_layer.one_row(row, weight, norm=norm[0], epsilon=1e-6, gated=True)
        wanted = torch.nn.functional.silu(gate) * up
        assert (gated.double() - wanted).norm() / wanted.norm() < LIMIT[dtype]
        wanted = residual.double() + exact @ weight.double().T
        ours = triton_layer.one_row(row, weight, residual=residual)
        assert (ours.double() - wanted).norm() / wanted.norm() < LIMIT[dtype]


def test_the_nucleus_is_that_of_a_sort() -> None:
    from penstock.worker.models.kernels.triton_sampling import nucleus_floors

    probabilities = torch.softmax(torch.randn(33, 50_000, device=DEVICE) * 3, dim=-1)
    shares = torch.rand(33, 1, device=DEVICE)
    ordered = probabilities.double().sort(dim=-1, descending=True).values
    before = ordered.cumsum(dim=-1) - ordered
    kept = (before < shares * ordered.sum(dim=-1, keepdim=True)).sum(dim=-1).clamp_min(1)
    ours = (probabilities >= nucleus_floors(probabilities, shares)).sum(dim=-1)
    assert (ours - kept).abs().max() <= 1  # where the sums of float32 and float64 part
