"""The formats that checkpoints are quantised to, all of compressed-tensors: tensors and wording.

All of them are symmetric, and of weights alone: who reads them multiplies with floats that are not
rounded. Only float8 experts are not served like that elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from penstock.catalog.weights import Tensor as Header
from penstock.worker.quantize import rounding

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

_WORD_BITS = 32
_GROUPS = (128, 64, 32)  # inputs; those that other servers have kernels for
_TAGS = {torch.float16: "F16", torch.bfloat16: "BF16"}


class Scheme(ABC):
    """What weights [outputs, inputs] become."""

    @abstractmethod
    def takes(self, inputs: int) -> bool:
        """Whether weights with so many inputs can have this form."""

    @abstractmethod
    def headers(self, shape: tuple[int, int], scale: torch.dtype) -> dict[str, Header]:
        """The tensors of a weight, by the last parts of their names."""

    @abstractmethod
    def round(self, rows: Tensor, scale: torch.dtype) -> dict[str, Tensor]:
        """The parts of those tensors for some outputs, in float32; ValueError: not finite."""

    def whole(self, shape: tuple[int, int]) -> dict[str, Tensor]:
        """Those of the tensors that are of the weight as a whole."""
        return {}

    @abstractmethod
    def described(self, ignored: Collection[str]) -> dict[str, Any]:
        """The quantization_config of a model whose linear layers are all so, but for `ignored`."""


@dataclass(frozen=True, slots=True)
class Integers(Scheme):
    """`pack-quantized`: integers in words of 32 bits, with a scale for each group of inputs, or
    for all of them."""

    bits: int
    group: int | None = None

    def takes(self, inputs: int) -> bool:
        return inputs % (self.group or _WORD_BITS // self.bits) == 0

    def headers(self, shape: tuple[int, int], scale: torch.dtype) -> dict[str, Header]:
        outputs, inputs = shape
        words, groups = inputs * self.bits // _WORD_BITS, inputs // (self.group or inputs)
        return {
            "weight_packed": Header("I32", (outputs, words), 4 * outputs * words),
            "weight_scale": Header(_TAGS[scale], (outputs, groups), 2 * outputs * groups),
            "weight_shape": Header("I64", (2,), 16),
        }

    def round(self, rows: Tensor, scale: torch.dtype) -> dict[str, Tensor]:
        codes, scales = rounding.to_integers(rows, self.bits, self.group or rows.shape[1], scale)
        return {"weight_packed": rounding.to_words(codes, self.bits), "weight_scale": scales}

    def whole(self, shape: tuple[int, int]) -> dict[str, Tensor]:
        return {"weight_shape": torch.tensor(shape)}

    def described(self, ignored: Collection[str]) -> dict[str, Any]:
        kind = {"num_bits": self.bits, "type": "int", "symmetric": True, "dynamic": False}
        of = {"strategy": "group", "group_size": self.group}
        weights = kind | (of if self.group else {"strategy": "channel", "group_size": None})
        return _described("pack-quantized", weights, None, ignored)


@dataclass(frozen=True, slots=True)
class Fp8(Scheme):
    """`float-quantized`: e4m3 with a scale for each output."""

    rounds_activations: bool  # to float8 as well, by servers that can

    def takes(self, inputs: int) -> bool:
        return True

    def headers(self, shape: tuple[int, int], scale: torch.dtype) -> dict[str, Header]:
        outputs, inputs = shape
        return {
            "weight": Header("F8_E4M3", shape, outputs * inputs),
            "weight_scale": Header(_TAGS[scale], (outputs, 1), 2 * outputs),
        }

    def round(self, rows: Tensor, scale: torch.dtype) -> dict[str, Tensor]:
        codes, scales = rounding.to_fp8(rows, scale)
        return {"weight": codes, "weight_scale": scales}

    def described(self, ignored: Collection[str]) -> dict[str, Any]:
        kind = {"num_bits": 8, "type": "float", "symmetric": True}
        weights = kind | {"dynamic": False, "strategy": "channel", "group_size": None}
        activations = kind | {"dynamic": True, "strategy": "token"}
        return _described(
            "float-quantized", weights, activations if self.rounds_activations else None, ignored
        )


def scheme_for(name: str, inputs: Collection[int], *, has_experts: bool) -> Scheme:
    """By the name that a user gives it, for weights with these numbers of inputs."""
    if name == "fp8":
        return Fp8(rounds_activations=has_experts)
    if name == "int8":
        return Integers(8)
    # One size of groups for all of a model, as other servers expect of layers that they join.
    fitting = [count for count in inputs if count % _GROUPS[-1] == 0]
    sizes = (size for size in _GROUPS if all(count % size == 0 for count in fitting))
    return Integers(4, next(sizes))


def _described(
    layout: str,
    weights: dict[str, Any],
    activations: dict[str, Any] | None,
    ignored: Collection[str],
) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "format": layout,
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
    }
