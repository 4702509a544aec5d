"""The weights of linear layers, in every format: how they are read, joined and multiplied.

Whoever multiplies with a layer's weight asks `weight_of` for it and never looks at the module's
tensors. `LinearWeight` computes with torch's own product; a backend has kernels of its own for some
weights, in a table by their class, of which many formats share one. Which tensors of a file are in
which format, and what a format takes in memory, is in `penstock.catalog.linear_formats`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.worker.models.linear import reading
from penstock.worker.models.linear.experts import PackedExperts, PlainExperts, experts_of
from penstock.worker.models.linear.fusing import fuse
from penstock.worker.models.linear.gguf_blocks import GGUF_WEIGHTS
from penstock.worker.models.linear.packed import (
    PackedEmbedding,
    PackedLinear,
    PackedWeight,
    tile_outputs,
)
from penstock.worker.models.linear.weight import LinearWeight, Parts, PlainWeight, weight_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from penstock.catalog.linear_formats import FormattedWeight

    # A file's tensors that the format reads, the model's scratch tile, and what the catalog found.
    Reader = Callable[[Mapping[str, Tensor], Tensor, FormattedWeight], PackedWeight]

# By the names that the catalog has for formats.
READERS: dict[str, Reader] = {
    "fp8-channel": reading.channel_fp8,
    "fp8-block": reading.block_fp8,
    "mxfp8": reading.mxfp8,
    "int8": reading.rounded_to_int8,
    "ct-int8": reading.ct_int8,
    "ct-pack": reading.ct_packed,
    "gptq": reading.gptq,
    "gptq-v2": reading.gptq_v2,
    "awq": reading.awq,
    "mxfp4": reading.mxfp4,
    "nvfp4": reading.nvfp4,
    "nvfp4-modelopt": reading.nvfp4_modelopt,
    "bnb-4bit": reading.bitsandbytes,
    **{kind.format.name: kind.read for kind in GGUF_WEIGHTS},
}

__all__ = [
    "READERS",
    "LinearWeight",
    "PackedEmbedding",
    "PackedExperts",
    "PackedLinear",
    "PackedWeight",
    "Parts",
    "PlainExperts",
    "PlainWeight",
    "experts_of",
    "fuse",
    "tile_outputs",
    "weight_of",
]
