"""One forward on a GPU: steps of decodes alone are replayed from graphs, others are launched.

A graph is captured for each of a few numbers of rows, before the profile, so that what they keep
is in the base that everything else is counted from. A step with fewer rows runs in the next larger
graph; the rows that nobody asked for see one token in block 0, which belongs to no sequence.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from penstock.worker.backends.caps import is_out_of_memory
from penstock.worker.backends.cuda.kernels.cuda_kernels import CudaKernels
from penstock.worker.backends.cuda.kernels.paging import chunk_tiling
from penstock.worker.backends.cuda.paged_batch import BufferSizes, Inputs, cut_for, describe
from penstock.worker.core.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from penstock.worker.backends.runner import Runner

log = logging.getLogger(__name__)

_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64)
_BUCKET_STEP = 32  # beyond these


class CudaRunner:
    """Keeps a runner's decode steps as graphs, and the numbers they read in their places."""

    def __init__(self, runner: Runner, sequences: int, window: int) -> None:
        assert isinstance(runner.kernels, CudaKernels)
        self._runner = runner
        self.model = runner.model
        self.device = runner.device
        memory = runner.memory
        layers, dtype = memory.layers, runner.model.dtype
        widest = max(max(layer.key_dim, layer.value_dim) for layer in layers)
        heads = max(layer.kv_heads for layer in layers)
        tile_rows = chunk_tiling(widest, dtype).rows
        windows = tuple(group.window for group in memory.groups)
        self._cut = cut_for(
            self.device, (heads, widest), dtype, memory.block_tokens, tile_rows, windows
        )
        max_items = sequences + self._cut.spread
        standing = BufferSizes(
            rows=sequences,
            wanted=sequences,
            sequences=sequences,
            items=(max_items,) * len(windows),
            tiles=0,
            # Sequences may share blocks, so there is no bound in what the arena has.
            tables=1 + sequences * -(-window // memory.block_tokens),
        )
        self._inputs = Inputs(self.device, standing, 2 * sequences)
        runner.kernels.prepare(self.device, max_items, sequences)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.graph_bytes = 0

    @property
    def tokens(self) -> Tensor:
        """Where a step leaves the tokens it sampled for the rows of the next."""
        return self._inputs.tokens

    @torch.inference_mode()
    def forward(self, plan: Plan, places: Mapping[int, int]) -> Tensor:
        """Write the plan's KV and return the wanted rows' logits, [R, vocabulary].

        Those of a graph are overwritten by its next step.
        """
        rows = plan.tokens
        bucket = next((b for b in sorted(self._graphs) if b >= rows), None)
        if plan.chunks or bucket is None:
            return self._runner.forward(self._inputs.bring(describe(plan, places, self._cut)))
        described = describe(plan, places, self._cut, padded=bucket)
        self._inputs.refill(described)
        graph, logits = self._graphs[bucket]
        graph.replay()
        return logits[:rows]

    @torch.inference_mode()
    def capture(self, sequences: int) -> None:
        """Make the graphs of up to so many decodes, if the model's code can be captured."""
        if self.device.type != "cuda":
            return
        started = time.perf_counter()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        pool = torch.cuda.graph_pool_handle()
        try:
            for rows in reversed(buckets(sequences)):  # the largest first: they share memory
                self._graphs[rows] = self._captured(rows, pool)
        except (RuntimeError, AssertionError) as error:
            if is_out_of_memory(error):
                raise
            # Something in it waits for the device, or looks at its numbers.
            log.warning("decode steps are launched kernel by kernel: %s", error)
            self._graphs.clear()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        self.graph_bytes = max(0, torch.cuda.memory_reserved(self.device) - before)
        log.info(
            "%d graphs take %d bytes and %.1f s",
            len(self._graphs),
            self.graph_bytes,
            time.perf_counter() - started,
        )

    def _captured(self, rows: int, pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self._inputs.refill(describe(Plan(), {}, self._cut, padded=rows))
        items = rows + self._cut.spread
        torch.cuda.synchronize(self.device)
        # Once outside: libraries allocate and kernels are compiled at their first call.
        self._runner.forward(self._inputs.standing_batch(rows, items))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = self._runner.forward(self._inputs.standing_batch(rows, items))
        return graph, logits


def buckets(sequences: int) -> list[int]:
    """Numbers of rows that get a graph, up to `sequences`."""
    beyond = range(_BUCKETS[-1] + _BUCKET_STEP, sequences, _BUCKET_STEP)
    return sorted({*(b for b in _BUCKETS if b < sequences), *beyond, sequences})
