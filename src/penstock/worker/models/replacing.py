"""Replacing a model's modules by others that compute the same, for the kernels of all backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def replace_modules(model: nn.Module, better: Callable[[Any], nn.Module | None]) -> None:
    """Put what `better` makes of a module in its place; None: it stays."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (other := better(child)) is not None:
                setattr(parent, name, other)


def rms_norm_parts(module: nn.Module) -> tuple[Tensor, float] | None:
    """Weight and epsilon of what is called an RMS norm; None if it has no such parts.

    Architectures differ in what they call by this name: only equal answers count.
    """
    if not type(module).__name__.endswith("RMSNorm"):
        return None
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    return weight, epsilon
