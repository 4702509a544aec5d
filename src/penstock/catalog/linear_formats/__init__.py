"""How the weights of linear layers lie in files and in memory: the one table of their formats.

Read from the names and dtypes in safetensors headers; a configuration's list of layers that are not
quantised is never asked, since it is wrong too often. The server takes a model's bytes from here,
the worker which layers to load packed: `worker/models/linear` has the code for each format.
"""

from penstock.catalog.linear_formats.base import (
    FormattedWeight,
    LinearFormat,
    full_name,
    split_name,
)
from penstock.catalog.linear_formats.files import (
    MADE_AT_LOAD,
    STORED,
    check_quantisation,
    is_unused,
    packed_linears,
    quantisation,
    scratch_bytes,
)
from penstock.catalog.linear_formats.fp8 import FP8_SCALES, BlockFp8
from penstock.catalog.linear_formats.gguf import GGUF_BLOCKS, GgufBlocks

__all__ = [
    "FP8_SCALES",
    "GGUF_BLOCKS",
    "MADE_AT_LOAD",
    "STORED",
    "BlockFp8",
    "FormattedWeight",
    "GgufBlocks",
    "LinearFormat",
    "check_quantisation",
    "full_name",
    "is_unused",
    "packed_linears",
    "quantisation",
    "scratch_bytes",
    "split_name",
]
