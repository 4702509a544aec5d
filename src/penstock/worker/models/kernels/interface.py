"""What a set of kernels does: one per kind of device, all over the same arena."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from penstock.worker.kv.layout.layer_blocks import LayerBlocks
    from penstock.worker.models.recurrent.kernels import StateKernels


@dataclass(frozen=True, slots=True)
class Masking:
    """How a layer's scores are shaped before the softmax."""

    scale: float
    window: int | None = None  # tokens a row sees, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]: a logit that takes weight and gives no value


class Kernels(Protocol):
    """KV of rows into blocks, attention of rows over blocks, and what else a model gains."""

    states: StateKernels  # of recurrent layers

    def adopt(self, model: PreTrainedModel) -> None:
        """Put the kernels' own parts into a loaded model."""

    def attend(
        self,
        rows: Tensor,  # [T, heads, key_dim]
        new: tuple[Tensor, Tensor],  # the rows' own keys and values, [T, kv_heads, dim]
        blocks: LayerBlocks,  # where the layer's KV lies
        batch: Any,  # as the runner of these kernels lays it out
        masking: Masking,
    ) -> Tensor:
        """Write the rows' KV to its places; what each row sees there, [T, heads, value_dim]."""
