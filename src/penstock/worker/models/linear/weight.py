"""The linear weight: the interface of all formats, plain weights, and several weights as one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Sequence


class LinearWeight(ABC):
    """The weight [outputs, inputs] of a linear layer, or of several that share their input."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of the rows that it is multiplied with."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it is."""

    @abstractmethod
    def multiply(self, rows: Tensor, out: Tensor) -> None:
        """Put the product of `rows` [T, inputs] into `out` [T, outputs]."""

    @abstractmethod
    def multiply_add(self, rows: Tensor, out: Tensor) -> None:
        """Add the product of `rows` to `out`."""

    def product(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """`rows` [..., inputs] times the weight, plus the bias."""
        flat = rows.reshape(-1, self.shape[1])
        out = flat.new_empty(flat.shape[0], self.shape[0])
        self.multiply(flat, out)
        if bias is not None:
            out.add_(bias)
        return out.view(*rows.shape[:-1], self.shape[0])

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[Self]) -> Self | None:
        """One weight with the outputs of all; None if they cannot be joined as they are."""

    @abstractmethod
    def view(self, begin: int, end: int) -> Self:
        """Some of a joined weight's outputs, in the same memory."""


@dataclass(frozen=True, slots=True)
class PlainWeight(LinearWeight):
    """A tensor of numbers in the type that is computed in."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def multiply(self, rows: Tensor, out: Tensor) -> None:
        torch.mm(rows, self.tensor.t(), out=out)

    def multiply_add(self, rows: Tensor, out: Tensor) -> None:
        out.addmm_(rows, self.tensor.t())

    def product(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(rows, self.tensor, bias)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(torch.cat([part.tensor.data for part in parts]))

    def view(self, begin: int, end: int) -> Self:
        return type(self)(self.tensor[begin:end])


class Parts(LinearWeight):
    """Weights of several formats or scales, side by side: each keeps its own."""

    def __init__(self, parts: Sequence[LinearWeight]) -> None:
        self.parts = tuple(parts)

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def multiply(self, rows: Tensor, out: Tensor) -> None:
        for part, columns in zip(self.parts, self._columns(out), strict=True):
            part.multiply(rows, columns)

    def multiply_add(self, rows: Tensor, out: Tensor) -> None:
        for part, columns in zip(self.parts, self._columns(out), strict=True):
            part.multiply_add(rows, columns)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls([part for several in parts for part in several.parts])

    def view(self, begin: int, end: int) -> Self:
        raise NotImplementedError  # nothing was copied: each module still has its own

    def _columns(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.split(out, [part.shape[0] for part in self.parts], dim=1)


def weight_of(module: object) -> LinearWeight | None:
    """A linear layer's weight; None for any other module, and for subclasses of torch's linear
    layer, which compute something else."""
    if type(module) is nn.Linear:
        return PlainWeight(module.weight)
    weight = getattr(module, "linear_weight", None)
    return weight if isinstance(weight, LinearWeight) else None
