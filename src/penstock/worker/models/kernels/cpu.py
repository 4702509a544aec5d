"""Decode attention on CPUs: reads the arena in place, one pass, no gather.

Compiled by Numba once per machine and kept in its cache. It runs on plain threads rather than
Numba's own pool: a second pool beside torch's would spin against it on the same cores.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch

from penstock.worker.models.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.worker.engine.batch import Batch
    from penstock.worker.models.kernels.interface import Masking

# Work below this many (head, token) pairs is not worth waking another thread for.
_PAIRS_PER_THREAD = 8192


class CpuKernels(ReferenceKernels):
    """float32 decode by Numba; chunks go through torch, whose matrix products are better there."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(max(1, self._threads - 1), "attention")
        self._flat: dict[int, NDArray[np.float32]] = {}
        self._warm_up()

    def decode(
        self,
        rows: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: Batch,
        masking: Masking,
        out: Tensor,
    ) -> None:
        heads, kv_heads = rows.shape[1], keys.shape[2]
        contexts = batch.decode_contexts.numpy()
        arguments: tuple[Any, ...] = (
            rows.contiguous().numpy(),
            self._arena(keys),
            (keys.storage_offset(), values.storage_offset(), keys.stride(0)),
            (keys.shape[1], kv_heads, values.shape[3]),
            batch.decode_tables.numpy(),
            contexts,
            (masking.scale, masking.window or 0, masking.softcap or 0.0),
            _NO_SINKS if masking.sinks is None else masking.sinks.float().numpy(),
            out.numpy(),
        )
        items = rows.shape[0] * kv_heads
        pairs = int(contexts.sum()) * heads
        parts = max(1, min(self._threads, items, pairs // _PAIRS_PER_THREAD))
        edges = [items * part // parts for part in range(parts + 1)]
        others = [
            self._pool.submit(partial(_decode, *arguments, first, last))
            for first, last in pairwise(edges[1:])
        ]
        _decode(*arguments, edges[0], edges[1])
        for other in others:
            other.result()

    def _arena(self, view: Tensor) -> NDArray[np.float32]:
        """The whole arena as one flat array: contiguous, so that loops over it vectorise."""
        storage = view.untyped_storage()
        flat = self._flat.get(storage.data_ptr())
        if flat is None:
            flat = torch.empty(0, dtype=view.dtype).set_(storage).numpy()
            self._flat = {storage.data_ptr(): flat}
        return flat

    def _warm_up(self) -> None:
        """Compile, or load from the cache, before anybody waits and before memory is capped."""
        one = np.zeros((1, 1, 8), np.float32)
        table, context = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
        flat = np.zeros(16, np.float32)
        shapes = ((0, 8, 16), (1, 1, 8), table, context, (1.0, 0, 0.0))
        _decode(one, flat, *shapes, _NO_SINKS, np.empty_like(one), 0, 1)


_NO_SINKS = np.zeros(0, np.float32)


def _compiled(function: Any) -> Any:
    return numba.njit(function, fastmath=True, nogil=True, cache=True)


@_compiled
def _decode(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0913, PLR0912
    rows, arena, offsets, sizes, tables, contexts, shaping, sinks, out, first, last
):
    """Items `first .. last` of (sequence, KV head): one pass, rescaled as the maximum grows."""
    key_offset, value_offset, block_stride = offsets
    block_tokens, kv_heads, value_dim = sizes
    scale, window, softcap = np.float32(shaping[0]), shaping[1], np.float32(shaping[2])
    key_dim = rows.shape[2]
    group = rows.shape[1] // kv_heads
    scores = np.empty((group, block_tokens), np.float32)
    best = np.empty(group, np.float32)
    total = np.empty(group, np.float32)
    sums = np.empty((group, value_dim), np.float32)
    for item in range(first, last):
        sequence, kv_head = item // kv_heads, item % kv_heads
        context = contexts[sequence]
        start = max(0, context - window) if window > 0 else 0
        best[:] = -np.inf
        total[:] = 0.0
        sums[:] = 0.0
        for block in range(start // block_tokens, (context + block_tokens - 1) // block_tokens):
            base = np.int64(tables[sequence, block]) * block_stride
            low = max(0, start - block * block_tokens)
            high = min(block_tokens, context - block * block_tokens)
            for member in range(group):
                query = rows[sequence, kv_head * group + member]
                peak = best[member]
                for slot in range(low, high):
                    at = base + key_offset + (slot * kv_heads + kv_head) * key_dim
                    score = np.float32(0.0)
                    for i in range(key_dim):
                        score += query[i] * arena[at + i]
                    score *= scale
                    if softcap > 0.0:
                        score = np.tanh(score / softcap) * softcap
                    scores[member, slot] = score
                    peak = max(peak, score)
                if peak > best[member]:
                    shrink = np.exp(best[member] - peak)
                    total[member] *= shrink
                    for i in range(value_dim):
                        sums[member, i] *= shrink
                    best[member] = peak
                for slot in range(low, high):
                    weight = np.exp(scores[member, slot] - peak)
                    total[member] += weight
                    at = base + value_offset + (slot * kv_heads + kv_head) * value_dim
                    for i in range(value_dim):
                        sums[member, i] += weight * arena[at + i]
        for member in range(group):
            head = kv_head * group + member
            weight = total[member]
            if sinks.shape[0] > 0:
                peak = max(best[member], sinks[head])
                shrink = np.exp(best[member] - peak)
                weight = weight * shrink + np.exp(sinks[head] - peak)
                for i in range(value_dim):
                    sums[member, i] *= shrink
            for i in range(value_dim):
                out[sequence, head, i] = sums[member, i] / weight
