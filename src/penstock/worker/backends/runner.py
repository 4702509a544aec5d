"""One forward of transformers' model over a packed batch, with penstock's attention inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.worker.models.attention import PagedStep, running

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from penstock.worker.backends.cuda.paged_batch import PagedBatch
    from penstock.worker.kv.memory import KvMemory
    from penstock.worker.models.batch import Batch
    from penstock.worker.models.kernels.interface import Kernels


class Runner:
    """Owns the model and the memory its KV lives in."""

    def __init__(
        self,
        model: PreTrainedModel,
        memory: KvMemory,
        kernels: Kernels,
        windows: tuple[int | None, ...],
    ) -> None:
        self.model = model
        self.kernels = kernels
        self.memory = memory
        self.block_tokens = memory.block_tokens
        self.device = memory.device
        self._windows = windows

    @torch.inference_mode()
    def forward(self, batch: Batch | PagedBatch) -> Tensor:
        """Write the batch's KV and return the wanted rows' logits, [R, vocabulary]."""
        step = PagedStep(batch, self.memory, self.kernels, self._windows)
        with running(step):
            answer = self.model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.logit_rows,
            )
        logits: Tensor = answer.logits[0]
        return logits
