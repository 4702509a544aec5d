"""Weights in the layout the device multiplies fastest.

On CPUs a plain matrix product of a few rows re-packs the whole weight at every call, which costs
more than reading it. oneDNN keeps it packed: the products of 4 to 32 rows take about half the
time. The packed weight replaces the plain one, so the bytes stay the same; a weight that is tied
to another module is left alone, since packing it would be a second copy.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """A linear layer over a weight in oneDNN's own layout."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.register_buffer("weight", torch.ops.mkldnn._reorder_linear_weight(plain.weight, None))
        self.bias = plain.bias

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` [..., in] times the weight."""
        answer: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self.weight, self.bias, "none", [], ""
        )
        return answer


def pack_linears(model: nn.Module) -> int:
    """Replace the model's linear layers by packed ones; how many."""
    if not _can_pack(model):
        return 0
    modules = (m for m in model.modules() if isinstance(getattr(m, "weight", None), Tensor))
    owners = Counter(module.weight.data_ptr() for module in modules)  # type: ignore[operator]
    packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # Subclasses compute something else.
            if type(child) is nn.Linear and owners[child.weight.data_ptr()] == 1:
                setattr(parent, name, PackedLinear(child))
                packed += 1
    return packed


def _can_pack(model: nn.Module) -> bool:
    parameter = next(model.parameters())
    return (
        parameter.device.type == "cpu"
        and parameter.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
