"""The memory KV lives in: one stable range per model, committed and returned extent by extent.

Block-major: all layers of a block lie together, so that one copy moves a block elsewhere.

    block 0                                    block 1
    [layer 0: K | V][layer 1: K | V] ...       [layer 0: K | V] ...
     K: [block_tokens, kv_heads, key_dim]

The range's address never changes, so whatever points at it (kernels, graphs) stays valid while
memory is committed under it and taken away again.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.worker.kv.ranges import Range, open_range, page_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

EXTENT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What one attention layer keeps for a token."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        """Values per token."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How a block is laid out over the layers."""

    layers: tuple[LayerGeometry, ...]
    block_tokens: int
    dtype: torch.dtype

    @property
    def block_elements(self) -> int:
        """Values in a block."""
        return self.block_tokens * sum(layer.elements for layer in self.layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_elements * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.block_bytes // self.block_tokens


class Arena:
    """Views of a committed-on-demand range, layer by layer; the `Backing` of a `BlockPool`."""

    def __init__(
        self,
        layout: BlockLayout,
        blocks: int,
        device: torch.device,
        extent_bytes: int | None = None,
    ) -> None:
        self.layout = layout
        self.device = device
        self.in_ram = device.type == "cpu"  # so that it counts in the process's own memory
        # Extents are whole blocks and whole pages, so that each is committed and returned alone.
        page = page_bytes(device)
        unit = page // math.gcd(page, layout.block_bytes)
        wanted = min(EXTENT_BYTES, extent_bytes or EXTENT_BYTES)
        self.extent_blocks = unit * max(1, wanted // (unit * layout.block_bytes))
        if blocks > self.extent_blocks:  # they are only addresses, and no extent is a short one
            blocks = -(-blocks // self.extent_blocks) * self.extent_blocks
        self.blocks = blocks
        self._extent_bytes = self.extent_blocks * layout.block_bytes
        self._total_bytes = -(-(blocks * layout.block_bytes) // page) * page
        self._committed: set[int] = set()
        self._touch = True
        self.range: Range = open_range(self._total_bytes, device)
        raw = self.range.tensor()[: blocks * layout.block_bytes]
        self._rows = raw.view(blocks, layout.block_bytes)
        flat = raw.view(layout.dtype)
        self.keys: list[Tensor] = []  # per layer: [blocks, block_tokens, kv_heads, key_dim]
        self.values: list[Tensor] = []
        offset = 0
        for layer in layout.layers:
            for dim, views in ((layer.key_dim, self.keys), (layer.value_dim, self.values)):
                heads = layer.kv_heads
                views.append(
                    flat.as_strided(
                        (blocks, layout.block_tokens, heads, dim),
                        (layout.block_elements, heads * dim, dim, 1),
                        offset,
                    )
                )
                offset += layout.block_tokens * heads * dim

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

    def blocks_within(self, size_bytes: int) -> int:
        """How many blocks can be in use when at most so much memory is committed."""
        extents, rest = divmod(size_bytes, self._extent_bytes)
        whole = extents * self.extent_blocks
        # A single extent may be a short one.
        short = self.blocks - whole
        if 0 < short < self.extent_blocks and rest >= self._total_bytes % self._extent_bytes:
            return self.blocks
        return min(whole, self.blocks)

    def bytes_for(self, blocks: int) -> int:
        """The most memory that is committed when so many blocks are in use."""
        return min(-(-blocks // self.extent_blocks) * self._extent_bytes, self._total_bytes)

    def close(self) -> None:
        """Return everything; the views are dead afterwards."""
        self.keys.clear()
        self.values.clear()
        self.range.close()

    def _bytes(self, extent: int) -> tuple[int, int]:
        start = extent * self._extent_bytes
        return start, min(self._extent_bytes, self._total_bytes - start)
