"""A model with its first layers only, for as long as a block runs.

Layers are computed one after the other in the same memory, so a few of each kind hold at once what
all of them do, in a fraction of the time.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from transformers import PreTrainedModel

_OF_EACH_KIND = 2  # the second is computed beside what the first has left
_LEAST = 10  # what one holds is a little chance: of so many the most is seen


@contextmanager
def first_layers(model: PreTrainedModel, windows: Sequence[int | None]) -> Iterator[None]:
    """The model ends behind as many layers as show what a step holds. It keeps all of them if it is
    not built as one list."""
    found = _list_of_layers(model)
    if found is None:
        yield
        return
    parent, name, layers = found
    kinds = [_kind(layer, window) for layer, window in zip(layers, windows, strict=True)]
    setattr(parent, name, nn.ModuleList(list(layers)[: enough(kinds)]))
    try:
        yield
    finally:
        setattr(parent, name, layers)


def enough(kinds: Sequence[Hashable]) -> int:
    """How many of the first layers have every kind among them, twice where it comes twice."""
    missing = Counter({kind: min(count, _OF_EACH_KIND) for kind, count in Counter(kinds).items()})
    for count, kind in enumerate(kinds, 1):
        missing = missing - Counter([kind])
        if not missing:
            return min(max(count, _LEAST), len(kinds))
    return len(kinds)


def _list_of_layers(model: PreTrainedModel) -> tuple[nn.Module, str, nn.ModuleList] | None:
    count = model.config.get_text_config().num_hidden_layers
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    return found[0] if len(found) == 1 else None


def _kind(layer: nn.Module, window: int | None) -> Hashable:
    """Equal for layers whose steps hold the same: what they are made of, and how far they see."""
    shapes = tuple((name, tuple(each.shape)) for name, each in layer.named_parameters())
    packed = tuple((name, tuple(each.shape)) for name, each in layer.named_buffers())
    parts = tuple(type(each) for each in layer.modules())
    return parts, shapes, packed, window
