"""What a packed format is to the catalog, and what all of them share."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.catalog.weights import Tensor

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
SCALE_DTYPES = frozenset({"F32", "F16", "BF16"})
EXPONENTS = frozenset({"U8", "F8_E8M0"})  # scales that are powers of two
FLOAT32_BYTES = 4

# Names whose last word alone does not say which weight they belong to.
_BITSANDBYTES = re.compile(
    r"(.+)\.(weight\.(?:(?:nested_)?absmax|(?:nested_)?quant_map|quant_state\.\w+))"
)
_STACKED = re.compile(r"(.+\.experts\.\w+_proj)(_blocks|_scales)")


@dataclass(frozen=True, slots=True)
class FormattedWeight:
    """The weight of a linear layer, or of stacked experts, that is no plain tensor in memory."""

    format: LinearFormat
    # [outputs, inputs]; of stacked experts [experts, outputs, inputs]; [numbers] where a header
    # does not say how they are arranged.
    shape: tuple[int, ...]
    tensors: frozenset[str]  # that are read: the last parts of their names, as of `split_name`
    resident_bytes: int

    @property
    def parameters(self) -> int:
        """How many weights it stands for."""
        return math.prod(self.shape)


class LinearFormat(ABC):
    """One way of keeping a weight [outputs, inputs] in memory other than as a plain tensor."""

    name: str

    @abstractmethod
    def find(
        self, module: str, parts: Mapping[str, Tensor], said: Mapping[str, Any]
    ) -> FormattedWeight | None:
        """The weight if `parts`, a module's tensors by the last parts of their names, are in this
        format; None: they are not. ValueError: they are, but do not fit each other. `said` is the
        quantization_config, for the little that headers do not say."""


def split_name(name: str) -> tuple[str, str]:
    """The module that a stored tensor belongs to, and the rest of its name."""
    if found := _BITSANDBYTES.fullmatch(name) or _STACKED.fullmatch(name):
        return found[1], found[2]
    module, _, leaf = name.rpartition(".")
    return module, leaf


def full_name(module: str, leaf: str) -> str:
    """The name that `split_name` splits."""
    return f"{module}{leaf}" if leaf.startswith("_") else f"{module}.{leaf}"


def item_bytes(tensor: Tensor) -> int:
    """Of one element; none of those asked for is smaller than a byte."""
    return tensor.size_bytes // max(1, tensor.elements)


def scale_bytes(scales: Tensor, outputs: int, groups: int) -> int:
    """In memory: one scale for each output is float32, those of groups stay as they are stored."""
    return outputs * (FLOAT32_BYTES if groups == 1 else groups * item_bytes(scales))


def groups_of(module: str, leaf: str, scales: Tensor, shape: tuple[int, int]) -> int:
    """Into how many groups `scales` divide the inputs of each output; 1 as well if there is one
    scale for the whole weight. ValueError: into none."""
    outputs, inputs = shape
    if scales.elements == 1 or scales.shape in ((outputs,), (outputs, 1)):
        return 1
    if len(scales.shape) == 2 and scales.shape[0] == outputs:
        groups = scales.shape[1]
        if groups and inputs % groups == 0:
            return groups
    raise ValueError(
        f"{full_name(module, leaf)} has shape {list(scales.shape)}, which does not divide the "
        f"{inputs} inputs of {outputs} outputs into equal groups"
    )


def check_shape(module: str, leaf: str, tensor: Tensor, wanted: tuple[int, ...]) -> None:
    """ValueError unless a tensor has this shape."""
    if tensor.shape != wanted:
        raise ValueError(
            f"{full_name(module, leaf)} has shape {list(tensor.shape)} instead of {list(wanted)}"
        )


def check_dtype(module: str, leaf: str, tensor: Tensor, wanted: frozenset[str]) -> None:
    """ValueError unless a tensor has one of these dtypes."""
    if tensor.dtype not in wanted:
        raise ValueError(
            f"{full_name(module, leaf)} is {tensor.dtype} instead of {' or '.join(sorted(wanted))}"
        )
