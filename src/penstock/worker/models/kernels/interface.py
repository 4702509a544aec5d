"""What a set of attention kernels does: one per kind of device, all over the same arena."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.worker.engine.batch import Batch, Span


@dataclass(frozen=True, slots=True)
class Masking:
    """How a layer's scores are shaped before the softmax."""

    scale: float
    window: int | None = None  # tokens a row sees, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]: a logit that takes weight and gives no value


class AttentionKernels(Protocol):
    """Attention of rows over blocks; the rows' own KV is already written."""

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
