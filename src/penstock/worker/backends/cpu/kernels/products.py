"""Products of rows with linear weights on a CPU, by the format of the weight.

A format with a kernel of its own has a row in `_LINEARS`; any other is multiplied tile by tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import torch
from torch import Tensor, nn

from penstock.worker.backends.cpu.kernels import loops as cpu_loops
from penstock.worker.models.linear import LinearWeight, PlainWeight, weight_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.worker.backends.cpu.kernels.memory import LayerMemory

_FEW = range(3, 49)  # rows; measured: below and above torch is as good
_WIDE = 8192  # weights
_TILE = 4  # rows and weights of one tile: 16 sums stay in registers


class TiledLinear(nn.Module):
    """A linear layer of any format, over memory that all layers share."""

    def __init__(self, linear: Any, memory: LayerMemory | None) -> None:
        super().__init__()
        self._memory = memory
        self.linear_weight: LinearWeight = linear.linear_weight
        self.in_features: int = linear.in_features
        self.out_features: int = linear.out_features
        self.bias = linear.bias

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` [..., in] times the weight."""
        if self._memory is None:
            return self.linear_weight.product(rows, self.bias)
        flat = rows.reshape(-1, self.in_features)
        answer = self._memory.rows(len(flat), self.out_features)
        self.linear_weight.multiply(flat, answer)
        if self.bias is not None:
            answer.add_(self.bias)
        return answer.view(*rows.shape[:-1], -1)


class FewRowsLinear(nn.Module):
    """A linear layer that shares its weight with the plain one it replaces.

    A decode step multiplies each weight with one row per running request. torch's product is good
    for one or two rows and for many, and poor between.
    """

    def __init__(self, plain: Any, memory: LayerMemory | None = None) -> None:
        super().__init__()
        self._memory = memory
        self.in_features: int = plain.in_features
        self.out_features: int = plain.out_features
        self.weight = plain.weight
        self.bias = plain.bias

    @classmethod
    def of(cls, plain: Any, memory: LayerMemory | None) -> FewRowsLinear | None:
        """The kernel takes weights in whole tiles."""
        return cls(plain, memory) if plain.out_features % _TILE == 0 else None

    @property
    def linear_weight(self) -> PlainWeight:
        """For who multiplies with it in another way."""
        return PlainWeight(self.weight)

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` [..., in] times the weight."""
        count = rows.numel() // self.in_features
        if count > _FEW[-1] and self.out_features > _WIDE:
            return self._in_slices(rows.reshape(count, -1)).view(*rows.shape[:-1], -1)
        if count > _FEW[-1] and self._memory is not None:
            answer = self._memory.rows(count, self.out_features)
            torch.mm(rows.reshape(count, -1), self.weight.t(), out=answer)
            if self.bias is not None:
                answer.add_(self.bias)
            return answer.view(*rows.shape[:-1], -1)
        if count not in _FEW:
            return nn.functional.linear(rows, self.weight, self.bias)
        answer = few_rows(rows.reshape(count, self.in_features), self.weight)
        if self.bias is not None:
            answer = answer + self.bias
        return answer.view(*rows.shape[:-1], self.out_features)

    def _in_slices(self, rows: Tensor) -> Tensor:
        """A vocabulary's logits: for some numbers of rows the whole product takes them twice."""
        answer = rows.new_empty(len(rows), self.out_features)
        for start in range(0, self.out_features, _WIDE):
            some = slice(start, start + _WIDE)
            torch.mm(rows, self.weight[some].t(), out=answer[:, some])
        return answer if self.bias is None else answer.add_(self.bias)


def few_rows(rows: Tensor, weight: Tensor) -> Tensor:
    """`rows` [M, in] times `weight` [out, in] transposed, float32: for 3 to about 48 rows."""
    count = rows.shape[0]
    padded = -(-count // _TILE) * _TILE
    if padded != count or not rows.is_contiguous():
        rows = nn.functional.pad(rows, (0, 0, 0, padded - count)).contiguous()
    out = rows.new_empty(padded, weight.shape[0])
    cpu_loops.few_rows(rows.numpy(), weight.numpy(), out.numpy(), numba.get_num_threads())
    return out[:count]


# What a kernel cannot take is None, and stays as it is.
_LINEARS: dict[type[LinearWeight], Callable[[Any, LayerMemory | None], nn.Module | None]] = {
    PlainWeight: FewRowsLinear.of,
}


def linear_for(module: nn.Module, memory: LayerMemory | None) -> nn.Module | None:
    """What computes a linear layer better; None for what is none, or stays as it is."""
    weight = weight_of(module)
    if weight is None or isinstance(module, FewRowsLinear | TiledLinear):
        return None
    return _LINEARS.get(type(weight), TiledLinear)(module, memory)


def warm_up() -> None:
    """Compile, or load from the cache."""
    few_rows(torch.zeros(_TILE, 8), torch.zeros(_TILE, 8))
