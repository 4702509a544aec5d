"""Recurrent layers in compiled loops and in plain torch: the same answers, the same states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from penstock.worker.backends.cpu.kernels.state_kernels import CpuStates
from penstock.worker.kv.layout.layer_states import LayerStates, StateGeometry, StateLayout
from penstock.worker.models.recurrent.kernels import (
    Convolution,
    DeltaRule,
    ReferenceStates,
    SelectiveScan,
)
from penstock.worker.models.recurrent.rows import StateRows, StateSpan

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("one_thread")

SLOTS, HEADS = 9, 3
# Two decodes, a chunk with snapshots on the way, one that begins, and a chunk of one row.
ROWS = StateRows(
    decodes=torch.tensor([4, 2]),
    decode_slots=np.array([4, 2]),
    chunks=(
        StateSpan(2, 1, ((16, 6), (48, 7), (50, 1)), 50),
        StateSpan(52, 3, ((20, 3),), 20),
        StateSpan(72, 5, ((1, 5),), 0),
    ),
    fresh=(3,),
    copies=(),
)
COUNT = 73


def layer(channels: int, matrices: tuple[int, ...]) -> LayerStates:
    """The second of two layers, in slots with anything in them."""
    shape = StateGeometry(channels, 3, "float32", matrices)
    layout = StateLayout((StateGeometry(5, 2, "float32"), shape))
    memory = torch.randn(SLOTS * layout.slot_bytes // 4).view(torch.uint8)
    made = layout.views(memory)[1]
    made.columns[3] = 0
    if made.matrices is not None:
        made.matrices[3] = 0
    return made


def copy_of(states: LayerStates) -> LayerStates:
    """The same slots elsewhere, laid out alike."""
    storage = states.columns.untyped_storage().clone()  # type: ignore[no-untyped-call]

    def there(view: Tensor) -> Tensor:
        numbers = torch.empty(0).set_(storage)
        return numbers.as_strided(view.shape, view.stride(), view.storage_offset())

    matrices = None if states.matrices is None else there(states.matrices)
    return LayerStates(there(states.columns), matrices)


def compare(act: Callable[[Any, LayerStates], Tensor], states: LayerStates) -> None:
    other = copy_of(states)
    ours, theirs = act(CpuStates(), states), act(ReferenceStates(), other)
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)
    # Whatever is in slots of nobody is still there.
    torch.testing.assert_close(states.columns, other.columns, rtol=2e-4, atol=2e-5)
    if states.matrices is not None:
        assert other.matrices is not None
        torch.testing.assert_close(states.matrices, other.matrices, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("activation", ["silu", None])
def test_convolutions(activation: str | None) -> None:
    torch.manual_seed(0)
    by = Convolution(torch.randn(10, 4), torch.randn(10), activation)
    rows = torch.randn(1, COUNT, 10).transpose(1, 2)
    compare(lambda kernels, states: kernels.convolve(rows, by, states, ROWS), layer(10, ()))


def delta_rows(key_dim: int, value_dim: int, *, by_key: bool) -> DeltaRule:
    query, key = torch.randn(2, COUNT, HEADS, key_dim)
    norm = torch.nn.functional.normalize
    decay = -torch.rand(COUNT, HEADS, key_dim) if by_key else -torch.rand(COUNT, HEADS)
    return DeltaRule(
        norm(query, dim=-1) * key_dim**-0.5,
        norm(key, dim=-1),
        torch.randn(COUNT, HEADS, value_dim),
        decay,
        torch.rand(COUNT, HEADS),
    )


@pytest.mark.parametrize("sizes", [(16, 16), (24, 64), (8, 128), (16, 24)], ids=str)
@pytest.mark.parametrize("by_key", [False, True])
def test_delta_rules(sizes: tuple[int, int], *, by_key: bool) -> None:
    torch.manual_seed(1)
    rows = delta_rows(*sizes, by_key=by_key)
    chunk = kimi.chunk_kimi_delta_attention if by_key else qwen.torch_chunk_gated_delta_rule
    compare(
        lambda kernels, states: kernels.delta_rule(rows, states, ROWS, chunk),
        layer(4, (HEADS, *sizes)),
    )


@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 16), (4, 1, 48), (4, 4, 20)])
@pytest.mark.parametrize("skips", [True, False])
def test_selective_scans(heads: int, groups: int, width: int, *, skips: bool) -> None:
    torch.manual_seed(2)
    rows = SelectiveScan(
        torch.randn(COUNT, heads, 8),
        torch.rand(COUNT, heads),
        -torch.rand(heads),
        torch.randn(COUNT, groups, width),
        torch.randn(COUNT, groups, width),
        torch.randn(heads) if skips else None,
    )
    compare(
        lambda kernels, states: kernels.selective_scan(
            rows, states, ROWS, mamba2.mamba2_chunk_scan
        ),
        layer(4, (heads, 8, width)),
    )


def test_a_snapshot_on_the_way_is_the_state_of_a_chunk_that_ends_there() -> None:
    torch.manual_seed(3)
    rows, states = delta_rows(16, 16, by_key=False), layer(4, (HEADS, 16, 16))
    other, chunk = copy_of(states), qwen.torch_chunk_gated_delta_rule
    CpuStates().delta_rule(rows, states, ROWS, chunk)
    ends = StateRows(
        ROWS.decodes[:0], ROWS.decode_slots[:0], (StateSpan(2, 1, ((16, 1),), 16),), (), ()
    )
    CpuStates().delta_rule(rows, other, ends, chunk)
    assert states.matrices is not None and other.matrices is not None
    assert torch.equal(states.matrices[6], other.matrices[1])
