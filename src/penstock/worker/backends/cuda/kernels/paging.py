"""What attention over the arena is told: tables, work items, tiles; and how it cuts its work.

Plain data, so that whoever lays out a batch needs no compiler of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Paging:
    """Where the context of each sequence lies and how the work over it is cut; int32 all."""

    tables: Tensor  # block numbers, one sequence's after the other's
    starts: Tensor  # [sequences]: where each table begins
    contexts: Tensor  # [sequences]: tokens, the rows of this step among them
    slots: Tensor  # [T]: where each row's KV goes, block x block_tokens + place
    items: Tensor  # [4, items]: sequence (-1: none), begin, end, number within the sequence
    counts: Tensor  # [decodes]: items of each
    tiles: Tensor  # [4, tiles]: sequence, first row within its chunk, chunk's row, chunk's count
    decodes: int  # rows that are sequences of their own

    @property
    def item_count(self) -> int:
        """Work items, empty ones among them."""
        return self.items.shape[1]


@dataclass(frozen=True, slots=True)
class Tiling:
    """A kernel's choices for one width of heads."""

    rows: int
    columns: int
    warps: int
    stages: int


def decode_tiling(width: int, dtype: torch.dtype, decodes: int) -> Tiling:
    """Measured on an H200; memory is the bound, so others want nearly the same."""
    if dtype == torch.float32:
        return Tiling(16, 32 if width <= 128 else 16, 4, 2)
    if width > 128:
        return Tiling(16, 32, 4, 3)
    # Few programs want more in flight each.
    return Tiling(16, 128 if decodes <= _FEW_DECODES else 64, 4, 3)


_FEW_DECODES = 48


def chunk_tiling(width: int, dtype: torch.dtype) -> Tiling:
    """Measured on an H200."""
    if dtype == torch.float32:
        return Tiling(32, 32, 4, 2) if width <= 128 else Tiling(16, 16, 4, 1)
    return Tiling(128, 64, 4, 3) if width <= 128 else Tiling(64, 32, 4, 2)
