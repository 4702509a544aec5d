"""A GPU through CUDA: KV, steps and weights are in its memory, steps are launched and awaited."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from penstock.memory.device_kinds import CUDA
from penstock.memory.domains import Domain
from penstock.worker.backends.base import Backend
from penstock.worker.backends.cpu import PlainMemory
from penstock.worker.backends.cuda.caps import CudaCap
from penstock.worker.backends.cuda.copies import CudaCopies
from penstock.worker.backends.cuda.meter import CudaMeter, overhead_bytes
from penstock.worker.backends.cuda.ranges import PAGE_BYTES, CudaRange
from penstock.worker.backends.cuda.sampler import CudaSampler
from penstock.worker.backends.executor import BlockingExecutor
from penstock.worker.models.kernels.flat import attend_flat
from penstock.worker.models.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from penstock.worker.backends.caps import Cap
    from penstock.worker.backends.executor import Executor
    from penstock.worker.backends.meters import Committed, Meter
    from penstock.worker.backends.runner import Runner
    from penstock.worker.engine.grammar import Grammars
    from penstock.worker.kv.arena import Arena, LayerGeometry
    from penstock.worker.kv.device import Copies, Range
    from penstock.worker.kv.offload.host_buffers import HostBuffers
    from penstock.worker.models.kernels.flat import FlatAttention
    from penstock.worker.models.kernels.interface import Kernels


class PinnedMemory(PlainMemory):
    """RAM that is registered with CUDA piece by piece."""

    pins = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pin(self, address: int, size: int) -> None:
        torch.cuda.set_device(self._device)  # this may be a thread of its own
        _checked(_cudart().cudaHostRegister(address, size, 0))

    def unpin(self, address: int) -> None:
        _checked(_cudart().cudaHostUnregister(address))


class _LargeTiles(ReferenceKernels):
    tile_scores = 1 << 26


class CudaBackend(Backend):
    """One GPU."""

    kind = CUDA
    page_bytes = PAGE_BYTES
    extent_bytes = 64 << 20
    commits_slowly = False
    is_process_memory = False
    step_pair_limit = 1 << 26
    full_steps_are_cheap = True
    serves_states = False
    max_drafts = 0
    routing_changes_memory = False  # experts are computed in groups
    uneven_rows = (64, 128, 384)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.domain = Domain.gpu(device.index or 0)
        self.host_memory = PinnedMemory(device)
        self.sampler = CudaSampler()

    @property
    def processor(self) -> str:
        return f"cuda {torch.cuda.get_device_name(self.device)}"

    def prepare(self, model: PreTrainedModel, dtype: torch.dtype) -> Kernels:
        kernels: Kernels = _LargeTiles()
        if find_spec("triton") is not None:
            from penstock.worker.backends.cuda.kernels.cuda_kernels import CudaKernels

            kernels = CudaKernels()
        kernels.adopt(model)
        self._leave_the_weights_stream()
        return kernels

    def prepare_encoder(self) -> FlatAttention:
        self._leave_the_weights_stream()
        return attend_flat

    def _leave_the_weights_stream(self) -> None:
        """Compute on another stream from now on.

        Torch's allocator has memory for each stream apart. Where weights were packed there are
        holes between them: steps of some sizes would settle there, others find them too small and
        take more beside them, and what steps hold together would be more than the largest of them.
        """
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        torch.cuda.set_stream(stream)

    def executor(self, runner: Runner, grammars: Grammars, sequences: int, window: int) -> Executor:
        if isinstance(runner.kernels, ReferenceKernels):
            return BlockingExecutor(runner, grammars, self.sampler)
        from penstock.worker.backends.cuda.executor import CudaExecutor
        from penstock.worker.backends.cuda.runner import CudaRunner

        on_device = CudaRunner(runner, sequences, window)
        on_device.capture(sequences)
        return CudaExecutor(on_device, grammars, self.sampler)

    def open_range(self, size: int) -> Range:
        return CudaRange(size, self.device)

    def copies(self, arena: Arena, buffers: HostBuffers, *, out: bool) -> Copies:
        return CudaCopies(self.device, arena, buffers, out=out)

    def meter(self, kv: Committed) -> Meter:
        return CudaMeter(self.device)

    def _cap(self, kv: Committed, mapped_bytes: int) -> Cap:
        return CudaCap(self.device)

    def copied_bytes(self, tensors: Iterable[Tensor], folder: Path) -> int:
        return 0

    def overhead_bytes(self, known_bytes: int) -> int:
        return overhead_bytes(self.device, known_bytes)

    def gathered_tokens(self, layers: Sequence[LayerGeometry]) -> int:
        return 0

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _checked(code: object) -> None:
    if int(code):  # type: ignore[call-overload]
        raise RuntimeError(f"CUDA says {code}")
