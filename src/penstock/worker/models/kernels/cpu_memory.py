"""Large memory of a step on a CPU: taken once, used by every layer, gone behind the last of them.

A heap that gets it back after each layer gives parts of it to smaller tensors, and the next layer's
then comes to lie elsewhere: what a step takes would be a matter of chance, up to twice what is in
use at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from penstock.worker.meter import RamMeter

if TYPE_CHECKING:
    from torch import Tensor, nn

_MANY_LOGITS = 1 << 20


def make_room_for_logits(model: nn.Module) -> None:
    """Give back what layers have left in the heap before there are many logits.

    They would come on top of it, or not, as they happen to fit. Fetching it anew takes a step with
    so many rows a hundredth of its time; a prompt that only wants its next token has few logits.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        return
    vocabulary, meter = len(head.weight), RamMeter()

    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0]
        if rows.numel() // rows.shape[-1] * vocabulary >= _MANY_LOGITS:
            meter.drop_caches()

    head.register_forward_pre_hook(before)


class Between:
    """Memory for what lies between the products of a layer, the same for all layers of a step."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, *shapes: tuple[int, int]) -> list[Tensor]:
        """Matrices of these shapes, until somebody else takes some."""
        sizes = [math.prod(shape) for shape in shapes]
        if self._memory is None or self._memory.numel() < sum(sizes):
            self._memory = None  # before there is another
            self._memory = torch.empty(sum(sizes))
        pieces = self._memory[: sum(sizes)].split(sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def drop_behind(self, model: nn.Module) -> None:
        """Let go of it behind the model's last layer, before there are logits; also when a step
        fails."""
        body = getattr(model, "base_model", model)
        body.register_forward_hook(self._drop, always_call=True)

    def _drop(self, *_: object) -> None:
        self._memory = None
