"""One forward of transformers' model over a packed batch, with penstock's attention inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.worker.models.attention import PagedStep, running

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from penstock.worker.engine.batch import Batch
    from penstock.worker.engine.paged_batch import PagedBatch
    from penstock.worker.kv.arena import Arena
    from penstock.worker.models.kernels.interface import Kernels


class Runner:
    """Owns the model and the memory its KV lives in."""

    def __init__(
        self,
        model: PreTrainedModel,
        arena: Arena,
        kernels: Kernels,
        windows: tuple[int | None, ...],
        slots: dict[int, int],
    ) -> None:
        self.model = model
        self.kernels = kernels
        self._windows = windows
        self._slots = slots
        self.arena = arena
        self.device: torch.device = arena.keys[0].device

    @torch.inference_mode()
    def forward(self, batch: Batch | PagedBatch) -> Tensor:
        """Write the batch's KV and return the wanted rows' logits, [R, vocabulary]."""
        step = PagedStep(batch, self.arena, self.kernels, self._windows, self._slots)
        with running(step):
            answer = self.model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.logit_rows,
            )
        logits: Tensor = answer.logits[0]
        return logits
