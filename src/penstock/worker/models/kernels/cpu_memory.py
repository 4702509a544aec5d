"""Large memory of a step on a CPU: taken once, used by every layer, gone behind the last of them.

A heap that gets it back after each layer gives parts of it to smaller tensors, and the next layer's
then comes to lie elsewhere: what a step takes would be a matter of chance, up to twice what is in
use at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from penstock.worker.meter import RamMeter

if TYPE_CHECKING:
    from torch import Tensor, nn

MANY_ROWS = 49  # fewer have products of their own kind, and leave little behind
# Of a chunk's past, gathered at once: keys, and as many values.
_PAST_BYTES = 8 << 20
_PAST_TOKENS = (64, 1024)


def past_tokens(width: int) -> int:
    """How many tokens of a chunk's past are gathered at once, with keys of `width` numbers each."""
    least, most = _PAST_TOKENS
    return min(max(_PAST_BYTES // (width * torch.float32.itemsize), least), most)


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
        pieces = torch.split(self._memory[: sum(sizes)], sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def end_behind(self, model: nn.Module) -> None:
        """Let go of it behind the model's last layer, before there are logits; also when a step
        fails."""
        body = getattr(model, "base_model", model)
        body.register_forward_hook(self._layers_are_done, always_call=True)

    def _layers_are_done(self, _module: nn.Module, _inputs: object, answer: Any) -> None:
        self._memory = None
        # So does the heap, after many rows: what is mapped apart, logits or the next step's, would
        # come on top of what it keeps, and all steps together take more than each was measured to.
        # To fetch its pages anew once a step takes a hundredth of its time; once a layer, a third.
        if answer is None or answer[0].shape[-2] >= MANY_ROWS:
            RamMeter().drop_caches()
