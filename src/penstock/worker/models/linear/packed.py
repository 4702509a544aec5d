"""Weights in fewer bits than they are computed with, and the layers that have them.

The product here is the reference for every format, and what computes a format that a backend has
no kernel for: some outputs' weights are de-quantised into a scratch tile and multiplied by torch,
then the next. Activations stay floats, so that the result is that of the de-quantised weights
whatever the number of rows.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor, nn

from penstock.worker.models.linear.weight import LinearWeight

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_EVEN_OUTPUTS = 128  # of a tile: whole multiples


class PackedWeight(nn.Module, LinearWeight):
    """Codes [outputs, ...], their scales, and further tensors by name, each with a row for every
    output unless it is in `SHARED`."""

    SHARED: ClassVar[frozenset[str]] = frozenset()
    codes: Tensor
    scales: Tensor

    def __init__(self, codes: Tensor, scales: Tensor, scratch: Tensor, **others: Tensor) -> None:
        super().__init__()
        for name, tensor in {"codes": codes, "scales": scales, **others}.items():
            self.register_buffer(name, tensor, persistent=False)
        self.scratch = scratch  # of the whole model: [numbers], in the type that is computed in

    @abstractmethod
    def dequantise(self, begin: int, end: int, out: Tensor) -> None:
        """The weights of outputs `begin` to `end`, as numbers."""

    def rows(self, indices: Tensor) -> Tensor:
        """The weights of some outputs [indices, inputs], as numbers: of a table, its rows."""
        found = torch.empty(len(indices), self.shape[1], dtype=self.dtype, device=self.device)
        for at, index in enumerate(indices.tolist()):
            self.dequantise(index, index + 1, found[at : at + 1])
        return found

    @property
    def dtype(self) -> torch.dtype:
        return self.scratch.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def multiply(self, rows: Tensor, out: Tensor) -> None:
        for begin, end, tile in self._tiles():
            torch.mm(rows, tile.t(), out=out[:, begin:end])

    def multiply_add(self, rows: Tensor, out: Tensor) -> None:
        for begin, end, tile in self._tiles():
            out[:, begin:end].addmm_(rows, tile.t())

    def dequantised(self) -> Tensor:
        """All of it, in memory of its own: for comparisons at load."""
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.dequantise(0, self.shape[0], whole)
        return whole

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self | None:
        first = dict(parts[0].named_buffers())
        for part in parts[1:]:
            other = dict(part.named_buffers())
            if other.keys() != first.keys():
                return None
            if any(not _fits(other[n], first[n], n in cls.SHARED) for n in first):
                return None
        cat = {
            name: tensor
            if name in cls.SHARED
            else torch.cat([part.get_buffer(name) for part in parts])
            for name, tensor in first.items()
        }
        return cls(scratch=parts[0].scratch, **cat)

    def view(self, begin: int, end: int) -> Self:
        some = {
            name: tensor if name in self.SHARED else tensor[begin:end]
            for name, tensor in self.named_buffers()
        }
        return type(self)(scratch=self.scratch, **some)

    def _tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        outputs, inputs = self.shape
        most = tile_outputs(self.scratch.numel(), inputs)
        for begin in range(0, outputs, most):
            end = min(begin + most, outputs)
            tile = self.scratch[: (end - begin) * inputs].view(end - begin, inputs)
            self.dequantise(begin, end, tile)
            yield begin, end, tile


def tile_outputs(numbers: int, inputs: int) -> int:
    """How many outputs are de-quantised at a time into memory for so many numbers.

    Odd numbers of them make torch's products on a GPU several times slower.
    """
    most = max(1, numbers // inputs)
    return most - most % _EVEN_OUTPUTS if most > _EVEN_OUTPUTS else most


def _fits(part: Tensor, first: Tensor, shared: bool) -> bool:
    if part.dtype != first.dtype or part.shape[1:] != first.shape[1:]:
        return False
    return not shared or torch.equal(part, first)


class PackedLinear(nn.Module):
    """A linear layer with a packed weight."""

    linear_weight: LinearWeight  # a backend may put the same in another layout here

    def __init__(self, weight: PackedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.linear_weight = weight
        self.out_features, self.in_features = weight.shape
        self.bias = bias

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` [..., inputs] times the weight."""
        return self.linear_weight.product(rows, self.bias)


class PackedEmbedding(nn.Module):
    """A table of embeddings in a packed format; the head may have the same weight."""

    embed_scale: Tensor | None

    def __init__(self, weight: PackedWeight, plain: nn.Module) -> None:
        super().__init__()
        self.table = weight  # not `linear_weight`: rows are looked up, not multiplied with
        self.num_embeddings, self.embedding_dim = weight.shape
        # Some architectures multiply what they look up.
        self.register_buffer("embed_scale", getattr(plain, "embed_scale", None), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of `ids` [...]."""
        rows = self.table.rows(ids.reshape(-1))
        rows = rows.view(*ids.shape, self.embedding_dim)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)
