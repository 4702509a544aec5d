"""The tokens that numpy finds are torch's."""

from __future__ import annotations

import torch

from penstock.worker.backends.cpu.sampler import CpuSampler
from penstock.worker.engine.sampler import Sampler


def test_ties_infinities_and_what_is_no_number_are_taken_as_torch_takes_them() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 3, (64, 333), generator=generator).float()
    logits[1] = -torch.inf
    logits[2, 100] = logits[2, 200] = torch.inf
    logits[3, 50] = logits[3, 70] = torch.nan
    logits[4, 332] = 9.0
    assert torch.equal(CpuSampler().best(logits), Sampler().best(logits))
    some = logits[:, 5:300]  # not contiguous
    assert torch.equal(CpuSampler().best(some), Sampler().best(some))
