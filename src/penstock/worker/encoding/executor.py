"""A packed step computed: one forward, and what comes behind it. Changes no text."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from penstock.worker.backends.caps import is_out_of_memory
from penstock.worker.encoding.engine import StepVectors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from penstock.worker.backends.executor import StepLock
    from penstock.worker.encoding.packing import PackedStep
    from penstock.worker.encoding.runner import EncodeRunner


class EncodeExecutor:
    """Steps are over when they return; one process at a time computes under a `lock`."""

    def __init__(self, runner: EncodeRunner, lock: StepLock | None) -> None:
        self.runner = runner
        self._lock = lock

    @property
    def crowded(self) -> bool:
        """Whether others want the same processor: then a long step is in their way."""
        return self._lock is not None and self._lock.crowded

    def encode(self, step: PackedStep) -> StepVectors:
        """The texts' results, on the host."""
        begun = time.perf_counter()
        with self._turn():
            started = time.perf_counter()
            results = self.runner.encode(step.texts)
            # One copy from the device, whatever the number of texts.
            every = torch.split(torch.cat(results).cpu(), [len(result) for result in results])
            vectors = [_bytes(result) for result in every]
            ended = time.perf_counter()
        return StepVectors(vectors, forward_s=ended - started, waited_s=started - begun)

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether this is what running out of memory looks like."""
        return is_out_of_memory(error)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self._lock is None:
            yield
            return
        try:
            self._lock.take()
            yield
        finally:
            self._lock.give()


def _bytes(result: Tensor) -> bytes | None:
    """float32, little endian; None where it is not a number."""
    if not bool(torch.isfinite(result).all()):
        return None
    return result.numpy().astype("<f4").tobytes()
