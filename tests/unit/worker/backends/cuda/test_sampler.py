"""The part of the GPU's sampler that also runs without one."""

from __future__ import annotations

import numpy as np
import torch

from penstock.worker.backends.cuda.sampler import CudaSampler
from penstock.worker.engine.sampler import Sampler


def test_masks_are_unpacked_to_the_same_numbers_as_on_a_cpu() -> None:
    packed = np.random.default_rng(0).integers(0, 256, (3, 40), dtype=np.uint8)
    device = torch.device("cpu")
    ours, plain = (kind().unpacked(packed, device) for kind in (CudaSampler, Sampler))
    assert torch.equal(ours, plain)
    assert plain[1, 9] == packed[1, 1] >> 1 & 1
