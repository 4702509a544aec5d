"""The CPU: KV, steps and weights are in this process's own RAM."""

from __future__ import annotations

import mmap
import platform
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from penstock.memory.device_kinds import CPU
from penstock.memory.domains import RAM
from penstock.worker.backends.base import Backend
from penstock.worker.backends.cpu.caps import OuterCap, RamCap
from penstock.worker.backends.cpu.copies import RamCopies
from penstock.worker.backends.cpu.kernels.memory import EXPERT_ROWS, past_tokens
from penstock.worker.backends.cpu.mapped_weights import copied_bytes
from penstock.worker.backends.cpu.meter import MANY_ROWS, RamMeter
from penstock.worker.backends.cpu.ranges import RamRange
from penstock.worker.backends.cpu.sampler import CpuSampler
from penstock.worker.backends.cpu.step_lock import STEP_LOCK
from penstock.worker.backends.cpu.thread_count import CountedSteps, LinuxCores, ThreadCount
from penstock.worker.backends.executor import BlockingExecutor
from penstock.worker.models.kernels.flat import attend_flat
from penstock.worker.models.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from penstock.worker.backends.caps import Cap
    from penstock.worker.backends.executor import Executor, StepLock
    from penstock.worker.backends.meters import Committed, Meter
    from penstock.worker.backends.runner import Runner
    from penstock.worker.engine.grammar import Grammars
    from penstock.worker.kv.arena import Arena, LayerGeometry
    from penstock.worker.kv.device import Copies, Range
    from penstock.worker.kv.offload.host_buffers import HostBuffers
    from penstock.worker.models.kernels.flat import FlatAttention
    from penstock.worker.models.kernels.interface import Kernels


class PlainMemory:
    """RAM that nobody but the CPU copies from: there is nothing to pin."""

    page_bytes = mmap.PAGESIZE
    pins = False

    def open_range(self, size: int) -> Range:
        return RamRange(size)

    def pin(self, address: int, size: int) -> None:
        pass

    def unpin(self, address: int) -> None:
        pass


def set_threads(threads: int) -> None:
    """Of torch, and of our kernels where they are in use, in the thread that calls."""
    torch.set_num_threads(threads)
    if "numba" in sys.modules:
        import numba

        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))


class CpuBackend(Backend):
    """All cores of this machine."""

    kind = CPU
    domain = RAM
    page_bytes = mmap.PAGESIZE
    extent_bytes = 16 << 20  # whose first use takes 10 to 40 ms
    commits_slowly = True
    is_process_memory = True
    step_pair_limit = 1 << 20
    full_steps_are_cheap = False
    serves_states = True
    max_drafts = 15  # with the newest token a multiple of what its kernels take at once
    routing_changes_memory = True
    uneven_rows = (MANY_ROWS, EXPERT_ROWS, 392)  # the first piece of a product's copy has 384

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.host_memory = PlainMemory()
        self.sampler = CpuSampler()

    @property
    def processor(self) -> str:
        return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"

    def prepare(self, model: PreTrainedModel, dtype: torch.dtype) -> Kernels:
        kernels = ReferenceKernels()
        if dtype == torch.float32 and find_spec("numba") is not None:  # which some processors lack
            from penstock.worker.backends.cpu.kernels.cpu_kernels import CpuKernels

            kernels = CpuKernels()
        kernels.adopt(model)
        return kernels

    def prepare_encoder(self) -> FlatAttention:
        return attend_flat

    def step_lock(self) -> StepLock:
        if not LinuxCores.readable():
            return STEP_LOCK
        threads = ThreadCount(torch.get_num_threads(), LinuxCores(), set_threads)
        return CountedSteps(STEP_LOCK, threads)

    def executor(self, runner: Runner, grammars: Grammars, sequences: int, window: int) -> Executor:
        return BlockingExecutor(runner, grammars, self.sampler, self.step_lock())

    def open_range(self, size: int) -> Range:
        return RamRange(size)

    def copies(self, arena: Arena, buffers: HostBuffers, *, out: bool) -> Copies:
        return RamCopies(arena, buffers, out=out)

    def meter(self, kv: Committed) -> Meter:
        return RamMeter(lambda: kv.committed_bytes)

    def _cap(self, kv: Committed, mapped_bytes: int) -> Cap:
        outer = OuterCap.enter()
        if outer is not None:
            outer.mapped_bytes = mapped_bytes
        return RamCap(kv, outer)

    def copied_bytes(self, tensors: Iterable[Tensor], folder: Path) -> int:
        return copied_bytes(tensors, folder)

    def overhead_bytes(self, known_bytes: int) -> int:
        return 0

    def gathered_tokens(self, layers: Sequence[LayerGeometry]) -> int:
        return past_tokens(max((layer.kv_heads * layer.key_dim for layer in layers), default=1))

    def synchronize(self) -> None:
        pass
