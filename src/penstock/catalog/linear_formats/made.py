"""Formats that plain weights are rounded to at load."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from penstock.catalog.linear_formats.base import (
    FLOAT32_BYTES,
    FLOATS,
    FormattedWeight,
    LinearFormat,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.catalog.weights import Tensor

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
_NUMBERED = re.compile(r"\.\d+\.")


class Int8(LinearFormat):
    """int8 with a scale for each output, of the weights of a model's layers.

    Embeddings, the head and routers stay as they are.
    """

    name = "int8"

    def find(
        self, module: str, parts: Mapping[str, Tensor], said: Mapping[str, Any]
    ) -> FormattedWeight | None:
        weight = parts.get("weight")
        if weight is None or weight.dtype not in FLOATS or len(weight.shape) != 2:
            return None
        if module.rpartition(".")[2] in _ROUTERS or not _NUMBERED.search(module):
            return None
        outputs, inputs = weight.shape
        resident_bytes = outputs * inputs + outputs * FLOAT32_BYTES
        return FormattedWeight(self, (outputs, inputs), frozenset({"weight"}), resident_bytes)
