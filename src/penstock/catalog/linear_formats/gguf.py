"""Blocks of GGUF files, one format for each type of block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.catalog.gguf.blocks import SERVED, BlockType
from penstock.catalog.linear_formats.base import FormattedWeight, LinearFormat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.catalog.weights import Tensor

GGUF = "GGUF_"  # in front of the dtypes of weights that stay GGUF blocks


class GgufBlocks(LinearFormat):
    """Blocks of one GGUF type, as the file has them."""

    def __init__(self, block: BlockType) -> None:
        self.block = block
        self.name = block.name.lower()

    def find(
        self, module: str, parts: Mapping[str, Tensor], said: Mapping[str, Any]
    ) -> FormattedWeight | None:
        weight = parts.get("weight")
        if weight is None or weight.dtype != f"{GGUF}{self.block.name}" or len(weight.shape) != 2:
            return None
        return FormattedWeight(self, weight.shape, frozenset({"weight"}), weight.size_bytes)


GGUF_BLOCKS = {block.name: GgufBlocks(block) for block in SERVED.values() if block.name != "F32"}
