"""What backends need of the process that workers are forked from: imports and compiled kernels."""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# Its step lock must be the same for all workers, so it is made before they are forked.
CPU_MODULE = "penstock.worker.backends.cpu"
# Where there may be a GPU; a compiler of kernels takes a second to import.
CUDA_MODULES = (
    "penstock.worker.backends.cuda.kernels.cuda_kernels",
    "penstock.worker.backends.cuda.executor",
    "penstock.worker.backends.cuda.runner",
)


def main() -> None:
    """`python -m penstock.worker.backends.preload`: compile, for whoever starts on this machine."""
    if find_spec("numba") is not None:
        compile_kernels()


def preload_backends() -> None:
    """Have all that can be had without a call to a device."""
    importlib.import_module(CPU_MODULE)
    if find_spec("numba") is not None:
        from penstock.worker.backends.cpu.kernels import layers

        compile_kernels()
        # What Numba needs for any kernel is set up by the first, which must have no threads.
        layers.warm_up()
    if torch.version.cuda is not None and find_spec("triton") is not None:
        for module in CUDA_MODULES:
            importlib.import_module(module)


def compile_kernels() -> None:
    """Have the CPU's kernels in Numba's cache, compiled by processes that end with it.

    A compiler keeps what it has taken: 50 MiB, of every worker that begins without that cache.
    """
    from penstock.worker.backends.cpu.kernels import cpu_kernels

    children = [_forked(part) for part in cpu_kernels.COMPILED]
    for pid in children:
        if pid is not None:
            os.waitpid(pid, 0)


def _forked(part: Callable[[], None]) -> int | None:
    """A process that runs it and ends; None where there can be none, and a worker compiles."""
    try:
        pid = os.fork()
    except OSError:
        return None
    if pid == 0:
        try:
            part()
        finally:
            os._exit(0)  # whatever went wrong is found again by whoever needs the kernels
    return pid


if __name__ == "__main__":
    main()
