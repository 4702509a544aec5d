"""Products of a single row with linear weights on a GPU, by the format of the weight.

A format with a kernel has a row in `_ONE_ROW`. Everything else, and more rows than one, is
multiplied by the weight itself: torch's product, of packed weights tile by tile, or by their codes
once they are in the layout that kernels read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from penstock.worker.backends.cuda.kernels import triton_layer
from penstock.worker.backends.cuda.kernels.packed import tiling
from penstock.worker.backends.cuda.kernels.packed.tiled import TiledWeight, Workspace
from penstock.worker.models.linear import (
    LinearWeight,
    PackedEmbedding,
    PackedLinear,
    PackedWeight,
    PlainWeight,
    weight_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def _plain_one_row(row: Tensor, weight: LinearWeight, *args: Any, **how: Any) -> Tensor:
    assert isinstance(weight, PlainWeight)
    return triton_layer.one_row(row, weight.tensor, *args, **how)


def _tiled_one_row(
    row: Tensor, weight: LinearWeight, bias: Tensor | None = None, **how: Any
) -> Tensor:
    assert isinstance(weight, TiledWeight)
    gated, norm, residual = how.get("gated", False), how.get("norm"), how.get("residual")
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out: Tensor = row.new_empty(1, outputs) if residual is None else residual
    weight.few_rows(
        row,
        out,
        bias=bias,
        norm=None if norm is None else (weight.ordered(norm), how["epsilon"]),
        gated=gated,
        added=residual is not None,
        early=how.get("early", False),
    )
    return out


_ONE_ROW: dict[type[LinearWeight], Callable[..., Tensor]] = {
    PlainWeight: _plain_one_row,
    TiledWeight: _tiled_one_row,
}


def tile_weights(model: nn.Module) -> tuple[int, int]:
    """Bring packed weights of layers into the layout that kernels read, one after the other, where
    there is a kernel; of how many, and how many there are."""
    device = next(model.parameters()).device
    workspace, found, taken = Workspace(device), 0, 0
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    looked_up = {id(table) for module in model.modules() if (table := _table(module)) is not None}
    for layer in layers:
        weight = layer.linear_weight
        if not isinstance(weight, PackedWeight):
            continue
        found += 1
        made = None if id(weight) in looked_up else tiling.tiled(weight, workspace)
        if made is not None:
            layer.linear_weight = made
            taken += 1
    return taken, found


def _table(module: nn.Module) -> PackedWeight | None:
    """Of embeddings whose rows are looked up; the head may have the same."""
    return module.table if isinstance(module, PackedEmbedding) else None


def has_one_row(weight: LinearWeight) -> bool:
    """Whether there is a kernel for a single row."""
    return type(weight) in _ONE_ROW


def one_row(row: Tensor, weight: LinearWeight, *args: Any, **how: Any) -> Tensor:
    """As `triton_layer.one_row`, for any format that has a kernel."""
    return _ONE_ROW[type(weight)](row, weight, *args, **how)


def linear_for(module: nn.Module) -> nn.Module | None:
    """What computes a linear layer better; None for what is none, or stays as it is."""
    weight = weight_of(module)
    if weight is None or isinstance(module, OneRowLinear) or not has_one_row(weight):
        return None
    return OneRowLinear(module)


class OneRowLinear(nn.Module):
    """A linear layer whose product of a single row is ours. Shares the weight it replaces."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.in_features: int = linear.in_features
        self.out_features: int = linear.out_features
        self.bias = linear.bias
        if isinstance(weight_of(linear), PlainWeight):
            self.weight = linear.weight
        else:
            self.packed = linear.linear_weight

    @property
    def linear_weight(self) -> LinearWeight:
        """For who multiplies with it in another way."""
        weight: Tensor | None = self._parameters.get("weight")
        return self.packed if weight is None else PlainWeight(weight)

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` [..., in] times the weight."""
        if rows.numel() != self.in_features:
            return self.linear_weight.product(rows, self.bias)
        row = rows.reshape(1, self.in_features)
        return one_row(row, self.linear_weight, self.bias).view(*rows.shape[:-1], -1)
