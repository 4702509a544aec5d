"""One forward of transformers' model over a packed batch, with penstock's attention inside."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from penstock.worker.models.attention import PagedStep, running
from penstock.worker.models.recurrent.hook import StateStep, cache_name, states_of

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        self._cache_name = cache_name(model)

    @torch.inference_mode()
    def forward(self, batch: Batch | PagedBatch) -> Tensor:
        """Write the batch's KV and return the wanted rows' logits, [R, vocabulary]."""
        step = PagedStep(batch, self.memory, self.kernels, self._windows)
        with running(step), self._states(batch) as named:
            answer = self.model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.logit_rows,
                **named,
            )
        logits: Tensor = answer.logits[0]
        return logits

    @contextmanager
    def _states(self, batch: Batch | PagedBatch) -> Iterator[dict[str, Any]]:
        """What a model with recurrent layers takes beside, so that it continues their states."""
        memory, rows = self.memory.states, batch.states
        if memory is None or rows is None:
            yield {}
            return
        for slot in rows.fresh:
            memory.bytes_of(slot).zero_()
        step = StateStep(rows, memory.layers, self.kernels.states)
        with states_of(step) as cache:
            yield {self._cache_name: cache}
        for source, target in rows.copies:
            memory.bytes_of(target).copy_(memory.bytes_of(source))
