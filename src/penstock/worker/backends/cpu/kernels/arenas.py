"""A layer's blocks as flat arrays, which is what compiled loops go over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.worker.backends.cpu.kernels import kv_loops
from penstock.worker.kv.layout.layer_blocks import LayerBlocks

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

NO_SINKS = np.zeros(0, np.float32)
_NO_SCALES = np.zeros(0, np.int16)


class Arenas:
    """Those that there are; each layer's is made once."""

    def __init__(self) -> None:
        self._known: dict[int, LayerArena] = {}

    def of(self, blocks: LayerBlocks) -> LayerArena:
        """The one in which a layer's blocks lie."""
        # Nothing else comes to lie there: the arena holds on to the tensors.
        address = blocks.keys.data_ptr()
        if (known := self._known.get(address)) is None:
            kind = _Numbers if blocks.scales is None else _Codes
            known = self._known[address] = kind(blocks)
        return known


class LayerArena(ABC):
    """One layer's keys and values."""

    def __init__(self, blocks: LayerBlocks) -> None:
        self._blocks = blocks
        self._flat = _flat(blocks.keys)
        # Of keys and of values in the first block, and from one block to the next.
        self._offsets = _places(blocks.keys, blocks.values)
        self._sizes = blocks.block_tokens, blocks.kv_heads, blocks.dims[1]
        self._scales: NDArray[Any] = _NO_SCALES
        self._scale_offsets = 0, 0, 0

    @abstractmethod
    def store(
        self,
        keys: NDArray[Any],
        values: NDArray[Any],
        blocks: NDArray[Any],
        slots: NDArray[Any],
    ) -> None:
        """Rows [T, kv_heads x dim] to block and slot of each."""

    @abstractmethod
    def load(self, wanted: Tensor, keys: Tensor, values: Tensor) -> None:
        """Some blocks as float32, [wanted, block_tokens, kv_heads, dim]."""

    def decode(
        self,
        rows: NDArray[Any],
        sequences: tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None],
        shaping: tuple[float, int, float],
        sinks: NDArray[Any],
        out: NDArray[Any],
    ) -> None:
        """Attention of decodes. Of each row the table and the context; and where sequences have
        several rows the first of each, and one past the last."""
        tables, contexts, firsts = sequences
        where = (rows, self._flat, self._offsets, self._scales, self._scale_offsets, self._sizes)
        if firsts is None:
            kv_loops.decode(*where, tables, contexts, shaping, sinks, out)
        else:
            kv_loops.decode_drafts(*where, tables, contexts, firsts, shaping, sinks, out)


class _Numbers(LayerArena):
    """As they are computed with."""

    def store(
        self, keys: NDArray[Any], values: NDArray[Any], blocks: NDArray[Any], slots: NDArray[Any]
    ) -> None:
        kv_loops.store(keys, values, self._flat, self._offsets, blocks, slots)

    def load(self, wanted: Tensor, keys: Tensor, values: Tensor) -> None:
        torch.index_select(self._blocks.keys, 0, wanted, out=keys)
        torch.index_select(self._blocks.values, 0, wanted, out=values)


class _Codes(LayerArena):
    """Of 8 bits, with scales."""

    def __init__(self, blocks: LayerBlocks) -> None:
        super().__init__(blocks)
        assert blocks.scales is not None
        self._scales = _flat(blocks.scales[0].view(torch.int16))
        self._scale_offsets = _places(*blocks.scales)

    def store(
        self, keys: NDArray[Any], values: NDArray[Any], blocks: NDArray[Any], slots: NDArray[Any]
    ) -> None:
        kv_loops.store_codes(
            *(keys, values, self._flat, self._offsets, self._scales, self._scale_offsets),
            *(self._sizes[1], blocks, slots),
        )

    def load(self, wanted: Tensor, keys: Tensor, values: Tensor) -> None:
        for part, (dim, out) in enumerate(zip(self._blocks.dims, (keys, values), strict=True)):
            kv_loops.restore(
                *(self._flat, self._offsets[part], self._offsets[2]),
                *(self._scales, self._scale_offsets[part], self._scale_offsets[2]),
                *(wanted.numpy(), dim, out.view(len(wanted), -1).numpy()),
            )


def _flat(view: Tensor) -> NDArray[Any]:
    """All that it is a view of, as one array: contiguous, so that loops over it vectorise."""
    flat: NDArray[Any] = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()).numpy()
    return flat


def _places(keys: Tensor, values: Tensor) -> tuple[int, int, int]:
    return int(keys.storage_offset()), int(values.storage_offset()), keys.stride(0)


def warm_up() -> None:
    """Compile, or load from the cache."""
    one = np.zeros((1, 1, 8), np.float32)
    table, context = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    place, wanted = np.zeros(1, np.int64), torch.zeros(1, dtype=torch.int64)
    for dtype in (torch.float32, torch.int8):
        flat = torch.zeros(2, 1, 1, 8, dtype=dtype)
        scales = torch.zeros(2, 1, 1, dtype=torch.bfloat16)
        of_codes = (scales[:1], scales[1:]) if dtype == torch.int8 else None
        arena = Arenas().of(LayerBlocks(flat[:1], flat[1:], of_codes))
        arena.store(one[0], one[0], place, place)
        for firsts in (None, np.array([0, 1], np.int32)):
            seen = table, context, firsts
            arena.decode(one, seen, (1.0, 0, 0.0), NO_SINKS, np.empty_like(one))
        arena.load(wanted, *torch.empty(2, 1, 1, 1, 8))
