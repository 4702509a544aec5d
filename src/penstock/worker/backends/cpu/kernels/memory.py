"""Memory of a step's layers on a CPU, laid out by us: the same for the same step, always.

What a heap needs for tensors of several sizes that come and go depends on what lay there before:
the same step took up to a quarter more in one process than in another. So tensors that our own
kernels make lie in mappings that begin empty with every step and are gone behind its last layer.
"""

from __future__ import annotations

import bisect
import math
import mmap
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.heap import trim_heap
from penstock.worker.backends.cpu.meter import MANY_ROWS

if TYPE_CHECKING:
    from torch import Tensor, nn

EXPERT_ROWS = 128  # of one expert, computed at once
# Of a chunk's past, gathered at once: keys, and as many values.
_PAST_BYTES = 8 << 20
_PAST_TOKENS = (64, 1024)
_ITEM_BYTES = torch.float32.itemsize
_APART = 64 // _ITEM_BYTES  # numbers: a tensor begins with a line of the processor's cache


def past_tokens(width: int) -> int:
    """How many tokens of a chunk's past are gathered at once, with keys of `width` numbers each."""
    least, most = _PAST_TOKENS
    return min(max(_PAST_BYTES // (width * _ITEM_BYTES), least), most)


class LayerMemory:
    """Lends memory to the tensors of a layer; when one is gone, the next has its place."""

    def __init__(self) -> None:
        self._width = 0
        self._mappings: list[_Mapping] = []

    def expect(self, width: int) -> None:
        """Of every row, so many numbers lie here at once: they get one mapping, and so can be
        shared out otherwise before and after."""
        self._width = max(self._width, width)

    def rows(self, count: int, width: int) -> Tensor:
        """A matrix of `count` rows with anything in it."""
        # A heap has no trouble with small ones.
        return self.empty(count, width) if count >= MANY_ROWS else torch.empty(count, width)

    def empty(self, *shape: int) -> Tensor:
        """A tensor with anything in it."""
        size = math.prod(shape)
        room = -(-size // _APART) * _APART
        for mapping in self._mappings:
            if (lent := mapping.lend(size, room)) is not None:
                return lent.view(shape)
        # What is empty has been too small: it would be held beside what takes its place.
        self._mappings = [mapping for mapping in self._mappings if mapping.in_use]
        mapping = _Mapping(room if self._mappings else max(room, shape[0] * self._width))
        self._mappings.append(mapping)
        return mapping.lend(size, room).view(shape)  # type: ignore[union-attr] # it has just that

    def end_behind(self, model: nn.Module) -> None:
        """Let go of it behind the model's last layer, before there are logits; also when a step
        fails."""
        body = getattr(model, "base_model", model)
        body.register_forward_hook(self._layers_are_done, always_call=True)

    def _layers_are_done(self, _module: nn.Module, _inputs: object, answer: Any) -> None:
        self._mappings = []
        # So does the heap, after many rows: what is mapped apart, logits or the next step's, would
        # come on top of what it keeps, and all steps together take more than each was measured to.
        # To fetch its pages anew once a step takes a hundredth of its time; once a layer, a third.
        if answer is None or answer[0].shape[-2] >= MANY_ROWS:
            trim_heap()


class _Mapping:
    """Memory of its own. It lives as long as any tensor in it."""

    def __init__(self, size: int) -> None:
        try:
            memory = mmap.mmap(
                -1, max(size, 1) * _ITEM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:  # the address space is used up, which is the cap's doing
            raise MemoryError(f"no {size * _ITEM_BYTES} bytes for a step's layers") from error
        self._numbers = np.frombuffer(memory, np.float32)
        self._lent: list[tuple[int, int]] = []  # from, to; in order

    @property
    def in_use(self) -> bool:
        """Whether any tensor lies here."""
        return bool(self._lent)

    def lend(self, size: int, room: int) -> Tensor | None:
        """The first gap of `room`, until the tensor is gone; None: there is none."""
        start = 0
        for begin, end in self._lent:
            if begin - start >= room:
                break
            start = end
        if start + room > len(self._numbers):
            return None
        piece, span = self._numbers[start : start + size], (start, start + room)
        bisect.insort(self._lent, span)
        # The tensor, and whatever is a view of it, holds on to this array and to nothing else.
        weakref.finalize(piece, self._lent.remove, span).atexit = False
        return torch.from_numpy(piece)
