"""The backend: what a device is to the rest of a worker. Its memory, its kernels, its steps.

Nothing outside this package asks which device it is: what differs has a name here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from penstock.worker.backends.caps import NoCap

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from penstock.memory.device_kinds import DeviceKind
    from penstock.memory.domains import Domain
    from penstock.worker.backends.caps import Cap
    from penstock.worker.backends.executor import Executor, StepLock
    from penstock.worker.backends.meters import Committed, Meter
    from penstock.worker.backends.runner import Runner
    from penstock.worker.engine.grammar import Grammars
    from penstock.worker.engine.sampler import Sampler
    from penstock.worker.kv.arena import Arena, LayerGeometry
    from penstock.worker.kv.device import Copies, HostMemory, Range
    from penstock.worker.kv.offload.host_buffers import HostBuffers
    from penstock.worker.models.kernels.flat import FlatAttention
    from penstock.worker.models.kernels.interface import Kernels


class Backend(ABC):
    """One device. It is also the `KvDevice` of the arenas that lie on it."""

    kind: DeviceKind
    device: torch.device
    domain: Domain  # where weights, KV and steps are booked
    sampler: Sampler

    page_bytes: int  # the unit in which its memory is committed
    extent_bytes: int  # of KV, committed at once
    commits_slowly: bool  # that takes a part of a step's time, so there is one between two steps
    host_memory: HostMemory
    # Weights, KV and steps are in this process's own RAM: they count in its private memory, and a
    # copy of KV in RAM would gain nothing.
    is_process_memory: bool

    # A chunk is shortened at the end of a long context, so that no step takes much longer than
    # others: rows times tokens they see.
    step_pair_limit: int
    serves_states: bool  # of recurrent layers
    # Drafts of one sequence that a step can verify; 0: it cannot, or nobody has measured it.
    max_drafts: int
    # Steps of full size take well under a second: they are run to confirm what is known.
    full_steps_are_cheap: bool
    # What a step takes depends on the experts that its tokens are sent to.
    routing_changes_memory: bool

    # Rows of a chunk at which what a step takes bends: more than these are multiplied otherwise; so
    # many of one expert are computed at once; more than these are copied in pieces by a product.
    uneven_rows: tuple[int, int, int]

    @property
    @abstractmethod
    def processor(self) -> str:
        """Its name; another one may round otherwise and have other costs."""

    @abstractmethod
    def prepare(self, model: PreTrainedModel, dtype: torch.dtype) -> Kernels:
        """Choose kernels for a model whose weights are in place, and put their parts into it."""

    @abstractmethod
    def prepare_encoder(self) -> FlatAttention:
        """The attention of models that keep no KV; their weights are in place."""

    def step_lock(self) -> StepLock | None:
        """Whose turn it is to compute; None: steps of several models do not hinder each other."""
        return None

    @abstractmethod
    def executor(self, runner: Runner, grammars: Grammars, sequences: int, window: int) -> Executor:
        """What runs plans of up to so many sequences; what it keeps of the device is taken here,
        before anything is measured."""

    @abstractmethod
    def open_range(self, size: int) -> Range:
        """Reserve addresses on the device; nothing is committed yet."""

    @abstractmethod
    def copies(self, arena: Arena, buffers: HostBuffers, *, out: bool) -> Copies:
        """The way to copy blocks from an arena on this device, or to it."""

    @abstractmethod
    def meter(self, kv: Committed) -> Meter:
        """The reading of what steps hold."""

    def cap(self, kv: Committed, mapped_bytes: int, *, enforced: bool) -> Cap:
        """The limit that this process is held to, with `mapped_bytes` of weights in files."""
        if not enforced:
            return NoCap()
        return self._cap(kv, mapped_bytes)

    @abstractmethod
    def _cap(self, kv: Committed, mapped_bytes: int) -> Cap: ...

    @abstractmethod
    def copied_bytes(self, tensors: Iterable[Tensor], folder: Path) -> int:
        """What of these weights is in RAM of this process, not mapped from the folder's files."""

    @abstractmethod
    def overhead_bytes(self, known_bytes: int) -> int:
        """What this process holds of the device, apart from its RAM, beside `known_bytes`."""

    @abstractmethod
    def gathered_tokens(self, layers: Sequence[LayerGeometry]) -> int:
        """Tokens before a chunk that are gathered at once; 0: they are read in place."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all that has been launched."""
