"""What a set of kernels does: one per kind of device, all over the same arena."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from penstock.worker.engine.batch import Batch, Span


@dataclass(frozen=True, slots=True)
class Masking:
    """How a layer's scores are shaped before the softmax."""

    scale: float
    window: int | None = None  # tokens a row sees, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]: a logit that takes weight and gives no value


class Kernels(Protocol):
    """KV of rows into blocks, attention of rows over blocks, and what else a model gains."""

    def adopt(self, model: Module) -> None:
        """Put the kernels' own parts into a loaded model."""

    def store(
        self, new_keys: Tensor, new_values: Tensor, keys: Tensor, values: Tensor, batch: Batch
    ) -> None:
        """Write the rows' own KV, [T, kv_heads, dim], to their places in the arena."""

    def decode(
        self,
        rows: Tensor,  # [decodes, heads, key_dim]
        keys: Tensor,  # [blocks, block_tokens, kv_heads, key_dim]
        values: Tensor,
        batch: Batch,
        masking: Masking,
        out: Tensor,  # [T, heads, value_dim]: the first `decodes` rows are written
    ) -> None: ...

    def chunk(
        self, rows: Tensor, keys: Tensor, values: Tensor, span: Span, masking: Masking, out: Tensor
    ) -> None: ...
