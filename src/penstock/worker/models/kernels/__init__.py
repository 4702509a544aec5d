"""Kernels over the KV arena: Numba on CPU, Triton on CUDA."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from penstock.worker.models.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from penstock.worker.models.kernels.interface import Kernels


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The best kernels for a device and a type of KV."""
    numba = find_spec("numba") is not None  # which some processors lack
    if device.type == "cpu" and dtype == torch.float32 and numba:
        from penstock.worker.models.kernels.cpu import CpuKernels

        return CpuKernels()
    if device.type == "cuda" and find_spec("triton") is not None:
        from penstock.worker.models.kernels.cuda import CudaKernels

        return CudaKernels()
    return ReferenceKernels()
