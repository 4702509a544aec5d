"""Backends: the devices that models run on. `open_backend` alone maps a name to a class."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.worker.backends.cpu import CpuBackend

if TYPE_CHECKING:
    from penstock.worker.backends.base import Backend

__all__ = ["default_device", "open_backend"]


def open_backend(name: str) -> Backend:
    """The backend of a device: `cpu`, or `cuda:N`."""
    device = torch.device(name)
    if device.type == "cuda":
        from penstock.worker.backends.cuda import CudaBackend

        return CudaBackend(device)
    if device.type == "cpu":
        return CpuBackend()
    raise ValueError(f"there is no backend for the device {name!r}: use cpu or cuda:N")


def default_device() -> str:
    """The first GPU, or the CPU."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"
