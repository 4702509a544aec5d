"""One layer's keys and values in the blocks of an arena, in whatever format they are kept.

Kernels that know a format read its tensors in place; everybody else stores and loads here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.worker.kv.layout.rounding import restored, rounded

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """Views of a layer's part of every block."""

    keys: Tensor  # [blocks, block_tokens, kv_heads, key_dim]: numbers, or codes
    values: Tensor  # [blocks, block_tokens, kv_heads, value_dim]
    # Of keys and of values, [blocks, block_tokens, kv_heads]; None: the numbers have none.
    scales: tuple[Tensor, Tensor] | None = None

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self.keys.shape[1]

    @property
    def kv_heads(self) -> int:
        """Heads of each token."""
        return self.keys.shape[2]

    @property
    def dims(self) -> tuple[int, int]:
        """Numbers of a key and of a value of one head."""
        return self.keys.shape[3], self.values.shape[3]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All there is."""
        return self.keys, self.values, *(self.scales or ())

    @property
    def floats(self) -> tuple[Tensor, ...]:
        """Those in which there can be no number."""
        return tuple(tensor for tensor in self.tensors if tensor.is_floating_point())

    def store(self, blocks: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write rows [T, kv_heads, dim] to their places: block and slot of each."""
        if self.scales is None:
            self.keys[blocks, slots] = keys
            self.values[blocks, slots] = values
            return
        for codes, scales, rows in zip(
            (self.keys, self.values), self.scales, (keys, values), strict=True
        ):
            codes[blocks, slots], scales[blocks, slots] = rounded(rows)

    def load(self, wanted: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of some blocks, as numbers: [wanted, block_tokens, kv_heads, dim]."""
        if self.scales is None:
            return self.keys[wanted], self.values[wanted]
        key_scales, value_scales = self.scales
        return (
            restored(self.keys[wanted], key_scales[wanted], dtype),
            restored(self.values[wanted], value_scales[wanted], dtype),
        )
