"""Fusing several linear layers of one input into one product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from penstock.worker.models.linear.weight import LinearWeight, Parts, PlainWeight, weight_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def fuse(linears: Sequence[Any]) -> LinearWeight:
    """Their weights as one, along their outputs; each layer's own becomes a view of it.

    Weights of different formats, or with scales that cannot lie side by side, stay what they are.
    """
    weights = [weight for linear in linears if (weight := weight_of(linear)) is not None]
    assert len(weights) == len(linears)
    kind = type(weights[0])
    joined = kind.joined(weights) if all(type(weight) is kind for weight in weights) else None
    if joined is None:
        return Parts(weights)
    begin = 0
    for linear, weight in zip(linears, weights, strict=True):
        end = begin + weight.shape[0]
        _set_weight(linear, joined.view(begin, end))
        begin = end
    return joined


def _set_weight(linear: Any, weight: LinearWeight) -> None:
    if isinstance(weight, PlainWeight):
        linear.weight = nn.Parameter(weight.tensor, requires_grad=False)
    else:
        linear.linear_weight = weight
