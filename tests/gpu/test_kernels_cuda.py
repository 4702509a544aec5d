"""Triton's attention, layer parts, experts and nucleus against plain torch in float64."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock.catalog.kv_formats import INT8, KvFormat, kv_format
from penstock.worker.kv.arena import BlockLayout, LayerGeometry
from penstock.worker.kv.layout.rounding import restored, rounded
from penstock.worker.models.kernels import reference
from penstock.worker.models.kernels.interface import Masking

if TYPE_CHECKING:
    from penstock.worker.kv.layout.layer_blocks import LayerBlocks

# With TRITON_INTERPRET=1 in the environment those of attention run on a CPU, slowly.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="no CUDA device"),
    # Of the interpreter, in rows that nobody asked for.
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

BLOCK = 16
DEVICE = "cpu" if INTERPRETED else "cuda:0"
LIMIT = {torch.bfloat16: 8e-3, torch.float32: 2e-5}


@pytest.fixture(autouse=True)
def _newer_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes arrays of one number for numbers, which NumPy does not any more."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


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


def arena_views(heads: Heads, blocks: int, form: KvFormat) -> LayerBlocks:
    """Keys and values of the second of two layers, and something in each place."""
    layer = LayerGeometry(heads.kv, heads.key_dim, heads.value_dim)
    layout = BlockLayout((LayerGeometry(1, 16, 32), layer), BLOCK, form)
    memory = torch.zeros(blocks * layout.block_bytes, dtype=torch.uint8, device=DEVICE)
    views = layout.views(memory)[1]
    places = torch.arange(blocks * BLOCK, device=DEVICE)
    past = (
        torch.randn(len(places), heads.kv, dim, device=DEVICE).to(views.floats[0].dtype)
        for dim in views.dims
    )
    views.store(places // BLOCK, places % BLOCK, *past)
    return views


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_attention_of_any_mixture(
    dtype: torch.dtype, heads: Heads, mask: dict[str, float], kv_dtype: str
) -> None:
    from penstock.worker.backends.cuda.kernels.cuda_kernels import CudaKernels
    from penstock.worker.backends.cuda.kernels.paging import chunk_tiling, decode_tiling
    from penstock.worker.backends.cuda.paged_batch import BufferSizes, Cut, Inputs, describe
    from penstock.worker.core.plan import Plan, Slice

    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of a bfloat16")
    torch.backends.cuda.matmul.allow_tf32 = False
    chance = random.Random(str((dtype, heads, mask)))
    spans = [(n - 1, 1) for n in (1, 17, 300, 2000)] + [(0, 7), (0, 130), (333, 65)]
    blocks = list(range(1, 1 + sum(-(-(start + count) // BLOCK) for start, count in spans)))
    chance.shuffle(blocks)
    total = len(blocks) + 1
    plan, tables = Plan(), []
    window = int(mask["window"]) if "window" in mask else None
    for number, (start, count) in enumerate(spans):
        mine = [blocks.pop() for _ in range(-(-(start + count) // BLOCK))]
        tables.append(torch.tensor(mine, device=DEVICE))
        numbers = np.asarray(mine, np.int32)
        if window is not None:  # what no row sees has no block any more
            numbers[: max(0, start - window + 1) // BLOCK] = 0
        piece = Slice(number, start, [0] * count, (numbers,), 1, samples=True)
        (plan.decodes if count == 1 else plan.chunks).append(piece)
    width = max(heads.key_dim, heads.value_dim)
    columns = decode_tiling(width, dtype, 4).columns
    cut = Cut(BLOCK, columns, 9, chunk_tiling(width, dtype).rows, (window,))
    batch = Inputs(torch.device(DEVICE), BufferSizes(1, 1, 1, (1,), 0, 1), 8).bring(
        describe(plan, {}, cut)
    )
    views = arena_views(heads, total, kv_format(kv_dtype, str(dtype).removeprefix("torch.")))
    rows = torch.randn(plan.tokens, heads.queries, heads.key_dim, device=DEVICE).to(dtype)
    new = (
        torch.randn(plan.tokens, heads.kv, heads.key_dim, device=DEVICE).to(dtype),
        torch.randn(plan.tokens, heads.kv, heads.value_dim, device=DEVICE).to(dtype),
    )
    sinks = torch.randn(heads.queries, device=DEVICE).to(dtype) if mask.get("sinks") else None
    masking = Masking(heads.key_dim**-0.5, window, mask.get("softcap"), sinks)
    kernels = CudaKernels()
    kernels.prepare(torch.device(DEVICE), 64, 8)
    # What is not written yet must not be read.
    for view in views.floats:
        view[tables[-1][-1], (333 + 65) % BLOCK :] = float("nan")
    ours = kernels.attend(rows, new, views, batch.groups[0], masking)
    exact = Masking(
        masking.scale, window, masking.softcap, sinks.double() if sinks is not None else None
    )
    row = 0
    for table, (start, count) in zip(tables, spans, strict=True):
        end = start + count
        seen_keys, seen_values = (
            part.flatten(0, 1)[:end].double() for part in views.load(table, torch.float32)
        )
        for seen, part in zip((seen_keys, seen_values), new, strict=True):
            written = part[row : row + count]
            if views.scales is not None:
                written = restored(*rounded(written), torch.float32)
            torch.testing.assert_close(seen[start:], written.double(), rtol=0, atol=slack(views))
        wanted = reference.attend(rows[row : row + count].double(), seen_keys, seen_values, exact)
        error = (ours[row : row + count].double() - wanted).norm() / wanted.norm()
        assert error < LIMIT[dtype]
        row += count


def slack(views: LayerBlocks) -> float:
    """Codes may differ by one where a scale is divided by otherwise, in numbers of this size."""
    return 0.0 if views.scales is None else 0.05


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_codes_of_what_is_no_number_spoil_their_own_vector_alone(bad: float) -> None:
    from penstock.worker.backends.cuda.kernels import triton_kv

    heads = Heads(8, 2, 80, 64)
    views = arena_views(heads, 3, INT8)
    new_keys, new_values = (
        torch.randn(4, 2, dim, device=DEVICE, dtype=torch.bfloat16) for dim in views.dims
    )
    new_keys[1, 0, 5], new_values[2, 1, 7], new_keys[3] = bad, -bad, 0.0
    slots = torch.arange(16, 20, dtype=torch.int32, device=DEVICE)
    triton_kv.store(new_keys, new_values, views, slots)
    keys, values = views.load(torch.tensor([1], device=DEVICE), torch.float32)
    keys, values = keys[0, :4], values[0, :4]
    assert not bool(keys[1, 0].isfinite().any()), "what was stored looks sound"
    assert not bool(values[2, 1].isfinite().any()), "what was stored looks sound"
    assert torch.equal(keys[3], torch.zeros_like(keys[3]))
    keys[1, 0] = values[2, 1] = 0.0
    assert bool(keys.isfinite().all()) and bool(values.isfinite().all())


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_keys_are_rotated_and_rounded_in_one_pass(dim: int, norms: bool) -> None:
    """The same as stored as numbers and rounded afterwards, but for a last digit."""
    from penstock.worker.backends.cuda.kernels import triton_layer

    heads, count, dtype = Heads(4, 2, dim, dim), 21, torch.float32
    packed = torch.randn(count, 8 * dim, device=DEVICE, dtype=dtype)
    cos, sin = (torch.randn(count, dim, device=DEVICE, dtype=dtype) for _ in "cs")
    of_queries, of_keys = (torch.rand(dim, device=DEVICE, dtype=dtype) for _ in "qk")
    weights = (of_queries, of_keys) if norms else None
    slots = torch.randperm(5 * BLOCK, device=DEVICE)[:count].to(torch.int32)
    plain, codes = (arena_views(heads, 5, form) for form in (kv_format("auto", "float32"), INT8))
    for views in (plain, codes):
        triton_layer.rotate_and_store(packed, (cos, sin), weights, 1e-6, views, slots)
    every = torch.arange(5, device=DEVICE)
    for part in range(2):
        exact, found = (
            views.load(every, dtype)[part].flatten(0, 1)[slots.long()] for views in (plain, codes)
        )
        steps = exact.abs().amax(dim=-1, keepdim=True) / 127
        # The interpreter cuts scales off where a GPU rounds them, so that the largest is cut too.
        assert float(((found - exact).abs() / steps).max()) < (1.02 if INTERPRETED else 0.52)


@pytest.mark.parametrize("dtype", LIMIT)
def test_one_row_products(dtype: torch.dtype) -> None:
    from penstock.worker.backends.cuda.kernels import triton_layer

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
    from penstock.worker.backends.cuda.kernels.triton_sampling import nucleus_floors

    probabilities = torch.softmax(torch.randn(33, 50_000, device=DEVICE) * 3, dim=-1)
    shares = torch.rand(33, 1, device=DEVICE)
    ordered = probabilities.double().sort(dim=-1, descending=True).values
    before = ordered.cumsum(dim=-1) - ordered
    kept = (before < shares * ordered.sum(dim=-1, keepdim=True)).sum(dim=-1).clamp_min(1)
    ours = (probabilities >= nucleus_floors(probabilities, shares)).sum(dim=-1)
    assert (ours - kept).abs().max() <= 1  # where the sums of float32 and float64 part
