"""float8 weights with a scale for each block of 128 x 128."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch

from penstock.catalog.linear_formats import BlockFp8
from penstock.worker.models.linear.packed import PackedWeight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_BLOCK = BlockFp8.BLOCK


class BlockFp8Weight(PackedWeight):
    """Codes in e4m3, scales [blocks of outputs, blocks of inputs] in float32."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantise(self, begin: int, end: int, out: Tensor) -> None:
        out.copy_(self.codes[begin:end])
        first, last = begin // _BLOCK, -(-end // _BLOCK)
        of_rows = self.scales[first:last, None].expand(-1, _BLOCK, -1).flatten(0, 1)
        of_rows = of_rows[begin - first * _BLOCK : end - first * _BLOCK, :, None]
        # Blocks at the right edge may be cut.
        whole = out.shape[1] // _BLOCK
        if whole:
            blocks = torch.unflatten(out[:, : whole * _BLOCK], 1, (whole, _BLOCK))
            blocks.mul_(of_rows[:, :whole])
        if whole * _BLOCK < out.shape[1]:
            out[:, whole * _BLOCK :].mul_(of_rows[:, whole])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self | None:
        # The blocks of one must not reach into the next, whose scales are others.
        if any(part.shape[0] % _BLOCK for part in parts[:-1]):
            return None
        return super().joined(parts)

    def view(self, begin: int, end: int) -> Self:
        blocks = self.scales[begin // _BLOCK : -(-end // _BLOCK)]
        return type(self)(self.codes[begin:end], blocks, self.scratch)
