"""Sampling on a GPU: values come from pinned memory, masks are unpacked there, no row is sorted."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from penstock.worker.engine.sampler import Sampler

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.worker.engine.sampler import Values


class CudaSampler(Sampler):
    """For logits in a GPU's memory."""

    slice_elements = 1 << 23

    def moved(self, values: Values, dtype: torch.dtype, device: torch.device) -> Tensor:
        pinned = torch.tensor(values, dtype=dtype, pin_memory=True)
        return pinned.to(device, non_blocking=True)

    def unpacked(self, packed: NDArray[np.uint8], device: torch.device) -> Tensor:
        shifts = torch.arange(8, dtype=torch.uint8, device=device)
        bits = torch.from_numpy(packed).to(device, non_blocking=True)[:, :, None] >> shifts
        return bits.bitwise_and_(1).flatten(1)

    def nucleus_floors(self, probabilities: Tensor, shares: Tensor) -> Tensor:
        if find_spec("triton") is None:
            return super().nucleus_floors(probabilities, shares)
        from penstock.worker.backends.cuda.kernels.triton_sampling import nucleus_floors

        return nucleus_floors(probabilities, shares)
