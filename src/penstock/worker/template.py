"""What the template process imports before it forks workers: hardly anything else happens here.

No tensor operation, no `torch.cuda` call, no thread: a fork of a process that has done any of
these hangs or fails on its first use of the device. The list costs about 330 MiB once, shared by
all workers, of which torch and transformers' base classes are 320: a model module more costs well
under one MiB, so the common architectures are all here.
"""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

MODULES = (
    "safetensors.torch",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "penstock.worker.loop",
    "penstock.worker.loading",
)
# An architecture that is not here is imported by the worker that needs it.
COMMON_ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt_oss",
    "glm4_moe",
)

# Where there may be a GPU; a compiler of kernels takes a second to import.
CUDA_MODULES = (
    "penstock.worker.models.kernels.cuda",
    "penstock.worker.engine.cuda_executor",
    "penstock.worker.engine.cuda_runner",
)


def _compile_apart(compile_all: Callable[[int], None]) -> None:
    """Have kernels in Numba's cache, compiled by a process that ends with it.

    A compiler keeps what it has taken: 50 MiB, of every worker that begins without that cache.
    """
    try:
        pid = os.fork()
    except OSError:
        return  # then a worker compiles them
    if pid == 0:
        try:
            compile_all(1)
        finally:
            os._exit(0)  # whatever went wrong is found again by whoever needs the kernels
    os.waitpid(pid, 0)


if find_spec("numba") is not None:
    from penstock.worker.models.kernels import cpu, cpu_layers

    _compile_apart(cpu.warm_up)
    # What Numba needs for any kernel is set up by the first, which must have no threads.
    cpu_layers.warm_up()
for _module in MODULES:
    importlib.import_module(_module)
for _name in COMMON_ARCHITECTURES:
    importlib.import_module(f"transformers.models.{_name}.modeling_{_name}")
if torch.version.cuda is not None and find_spec("triton") is not None:
    for _module in CUDA_MODULES:
        importlib.import_module(_module)
