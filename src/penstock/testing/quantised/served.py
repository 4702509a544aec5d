"""Single weights through the code that serves them: found by the catalog, read by the worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.catalog.linear_formats import packed_linears
from penstock.catalog.weights import TORCH_NAMES
from penstock.catalog.weights import Tensor as Header
from penstock.worker.models.linear import READERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from penstock.catalog.linear_formats import FormattedWeight
    from penstock.worker.models.linear import PackedWeight

_DTYPES = {getattr(torch, name): tag for tag, name in TORCH_NAMES.items()} | {
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}
_MODULE = "model.layers.0.proj"


def served(
    stored: Mapping[str, Tensor],
    shape: tuple[int, int],
    said: Mapping[str, Any],
    scratch: Tensor,
    dtype: str = "",
) -> tuple[PackedWeight, FormattedWeight]:
    """The weight of these tensors, by the last parts of their names, and what the catalog says."""
    headers = {
        f"{_MODULE}.{leaf}": Header(_DTYPES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
        for leaf, tensor in stored.items()
    }
    found = packed_linears(headers, dtype, Path("files"), said)[_MODULE]
    linear = replace(found, shape=shape)
    read = {leaf: stored[leaf] for leaf in linear.tensors}
    return READERS[linear.format.name](read, scratch, linear), found


def rounded_to_int8(weight: Tensor, scratch: Tensor) -> PackedWeight:
    """A plain weight as `dtype = "int8"` leaves it."""
    return served({"weight": weight}, (weight.shape[0], weight.shape[1]), {}, scratch, "int8")[0]
