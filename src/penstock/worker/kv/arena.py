"""The memory KV lives in: one stable range per model, committed and returned extent by extent.

Block-major: all layers of a block lie together, so that one copy moves a block elsewhere.

    block 0                                    block 1
    [layer 0: K | V][layer 1: K | V] ...       [layer 0: K | V] ...
     K: [block_tokens, kv_heads, key_dim]      V likewise; where they are codes, their scales
                                               follow: [block_tokens, kv_heads] of K, then of V

The range's address never changes, so whatever points at it (kernels, graphs) stays valid while
memory is committed under it and taken away again.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from penstock.catalog.states import NOMINAL_TOKEN_BYTES
from penstock.worker.kv.layout.cutter import Cutter
from penstock.worker.kv.layout.layer_blocks import LayerBlocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from penstock.catalog.kv_formats import KvFormat
    from penstock.worker.kv.device import KvDevice, Range


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What one attention layer keeps for a token."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def dims(self) -> tuple[int, int]:
        """Of a key and of a value."""
        return self.key_dim, self.value_dim

    def size_bytes(self, form: KvFormat) -> int:
        """Bytes per token."""
        return form.size_bytes(self.kv_heads * (self.key_dim + self.value_dim), 2 * self.kv_heads)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How a block is laid out over the layers."""

    layers: tuple[LayerGeometry, ...]
    block_tokens: int
    format: KvFormat

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        if not self.layers:
            return NOMINAL_TOKEN_BYTES
        size = sum(layer.size_bytes(self.format) for layer in self.layers)
        return self.format.token_bytes(size, self.block_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_tokens * self.token_bytes

    def views(self, memory: Tensor) -> tuple[LayerBlocks, ...]:
        """Each layer's part of the blocks that `memory` (bytes) consists of."""
        cutter = Cutter(memory, self.block_bytes)
        numbers = getattr(torch, self.format.name)
        found = []
        for layer in self.layers:
            heads = self.block_tokens, layer.kv_heads
            keys, values = (cutter.cut(numbers, *heads, dim) for dim in layer.dims)
            scales = None
            if self.format.scaled:
                scales = cutter.cut(_SCALES, *heads), cutter.cut(_SCALES, *heads)
            found.append(LayerBlocks(keys, values, scales))
        return tuple(found)


_SCALES = torch.bfloat16


class ByteArena:
    """A committed-on-demand range of equal blocks; the `Backing` of a `BlockPool`."""

    def __init__(
        self,
        block_bytes: int,
        blocks: int,
        device: KvDevice,
        extent_bytes: int | None = None,
    ) -> None:
        self.block_bytes = block_bytes
        self.device = device
        # Extents are whole blocks and whole pages, so that each is committed and returned alone.
        page = device.page_bytes
        unit = page // math.gcd(page, block_bytes)
        wanted = min(device.extent_bytes, extent_bytes or device.extent_bytes)
        self.extent_blocks = unit * max(1, wanted // (unit * block_bytes))
        if blocks > self.extent_blocks:  # they are only addresses, and no extent is a short one
            blocks = -(-blocks // self.extent_blocks) * self.extent_blocks
        self.blocks = blocks
        self._extent_bytes = self.extent_blocks * block_bytes
        at_once = max(1, device.extent_bytes // self._extent_bytes)
        self.step_extents = at_once if device.commits_slowly else None
        self._total_bytes = -(-(blocks * block_bytes) // page) * page
        self._committed: set[int] = set()
        self._touch = True
        self.range: Range = device.open_range(self._total_bytes)
        self._raw = self.range.tensor()[: blocks * block_bytes]
        self._rows = self._raw.view(blocks, block_bytes)

    @property
    def place(self) -> torch.device:
        """Where it lies."""
        return self._raw.device

    @property
    def unit_bytes(self) -> int:
        """What is committed and given back at once."""
        return min(self._extent_bytes, self._total_bytes)

    @property
    def committed_bytes(self) -> int:
        """Memory behind the range now."""
        return sum(self._bytes(extent)[1] for extent in self._committed)

    def commit(self, extent: int) -> None:
        """Back an extent with memory (zeros)."""
        self.range.commit(*self._bytes(extent), touch=self._touch)
        self._committed.add(extent)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """What is committed meanwhile counts against every limit, but its pages are not fetched:
        for those who take much of it and give it back without a look."""
        self._touch = False
        try:
            yield
        finally:
            self._touch = True

    def decommit(self, extent: int) -> None:
        """Give an extent's memory back to the system."""
        self._committed.remove(extent)
        self.range.decommit(*self._bytes(extent))

    def copy(self, moves: dict[int, int]) -> None:
        """Copy whole blocks, old number to new; no number is both."""
        for old, new in moves.items():
            self._rows[new] = self._rows[old]

    def bytes_of(self, block: int) -> Tensor:
        """All layers of a block."""
        return self._rows[block]

    def rows_of(self, first: int, count: int) -> Tensor:
        """All layers of neighbouring blocks, [count, bytes]."""
        return self._rows[first : first + count]

    def close(self) -> None:
        """Return everything; all views are dead afterwards."""
        self.range.close()

    def _bytes(self, extent: int) -> tuple[int, int]:
        start = extent * self._extent_bytes
        return start, min(self._extent_bytes, self._total_bytes - start)


class Arena(ByteArena):
    """The memory of a group's blocks, layer by layer."""

    def __init__(
        self,
        layout: BlockLayout,
        blocks: int,
        device: KvDevice,
        extent_bytes: int | None = None,
    ) -> None:
        super().__init__(layout.block_bytes, blocks, device, extent_bytes)
        self.layout = layout
        self.layers = layout.views(self._raw)

    def close(self) -> None:
        self.layers = ()
        super().close()
