"""What a model is profiled with: its parts, and how its steps are to be tried."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.worker.profiling.images import ImageCost
from penstock.worker.profiling.stress import NOISE_SHARE

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from penstock.wire import LoadSpec
    from penstock.worker.backends.base import Backend
    from penstock.worker.backends.caps import Cap
    from penstock.worker.backends.executor import Executor
    from penstock.worker.backends.meters import Meter
    from penstock.worker.core.plan import StepLimits
    from penstock.worker.kv.cache import KvCache
    from penstock.worker.kv.memory import KvMemory


@dataclass(frozen=True, slots=True)
class ProfileContext:
    """What a profile is measured with."""

    spec: LoadSpec
    backend: Backend
    executor: Executor
    memory: KvMemory
    kv: KvCache
    meter: Meter
    cap: Cap
    limits: StepLimits  # as asked for
    window: int
    vocabulary: int
    dtype: str  # what is computed in
    row_bytes: int  # of a token between two layers
    routes: bool  # the model sends tokens to experts
    fingerprint: str
    weight_bytes: int
    drafts: int = 0  # of one sequence, at most
    # For steps that are measured: the model with few of its layers, how often each is tried, and by
    # how much another such step, through all layers, may take more.
    shallow: Callable[[], AbstractContextManager[None]] = nullcontext
    repeats: int = 2
    images: ImageCost = field(default_factory=ImageCost)
    noise_share: float = NOISE_SHARE
