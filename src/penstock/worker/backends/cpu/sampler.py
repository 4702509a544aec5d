"""The sampler where logits are in this process's own RAM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.worker.engine.sampler import Sampler

if TYPE_CHECKING:
    from torch import Tensor


class CpuSampler(Sampler):
    """numpy finds the largest of a row ten times as quickly as torch."""

    def best(self, logits: Tensor) -> Tensor:
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
