"""What a CPU does better than torch's own operators: a few rows at a time.

Decode attention reads the arena in place, in one pass, without gathering blocks. Products of a
few rows with a weight read the weight once, where a general matrix product copies it into its own
layout at every call. Both are compiled by Numba once per machine and kept in its cache, and run
on the OpenMP threads that torch has already started: `omp` finds torch's library loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np
import torch
from torch import Tensor, nn

from penstock.worker.backends.cpu.kernels import (
    arenas,
    gguf_products,
    products,
    state_kernels,
)
from penstock.worker.backends.cpu.kernels import layers as cpu_layers
from penstock.worker.backends.cpu.kernels import loops as cpu_loops
from penstock.worker.backends.cpu.kernels.arenas import NO_SINKS, Arenas
from penstock.worker.backends.cpu.kernels.memory import LayerMemory, past_tokens
from penstock.worker.backends.cpu.kernels.one_call import fused_layers, layer_runs
from penstock.worker.backends.cpu.kernels.state_kernels import CpuStates
from penstock.worker.models.kernels.reference import ReferenceKernels
from penstock.worker.models.replacing import replace_modules, rms_norm_parts

if TYPE_CHECKING:
    from penstock.worker.kv.layout.layer_blocks import LayerBlocks
    from penstock.worker.models.batch import GroupBatch, Span
    from penstock.worker.models.kernels.interface import Masking

numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

_ATTENDED = 1 << 19  # numbers of the answers that attention makes at once


class CpuKernels(ReferenceKernels):
    """float32 decode by Numba; chunks go through torch, whose matrix products are better there."""

    def __init__(self) -> None:
        self._arenas = Arenas()
        self._memory = LayerMemory()
        self.states = CpuStates()
        warm_up(torch.get_num_threads())

    def adopt(self, model: nn.Module) -> None:
        """Send what our kernels do better to them; weights stay where they are."""
        gguf_products.adopt(model)
        found = fused_layers.find(model)
        cpu_layers.adopt_sums(model)
        cpu_layers.adopt_rotation(model, self._memory)
        # First, since its parts must still be plain.
        cpu_layers.adopt_mlps(model, self._memory)
        cpu_layers.adopt_experts(model, self._memory)
        self._memory.end_behind(model)
        for part in getattr(model, "base_model", model).children():
            replace_modules(part, _Quicker(self._memory))
        # The last norm and the head, whose answers outlive the layers' memory.
        replace_modules(model, _Quicker(None))
        # Last, since other steps go the way they have by now.
        fused_layers.install(model, found)

    def answers(self, rows: Tensor, width: int) -> Tensor:
        count, heads = rows.shape[:2]
        return self._memory.rows(count, heads * width).view(count, heads, width)

    def store(self, new: tuple[Tensor, Tensor], blocks: LayerBlocks, batch: GroupBatch) -> None:
        keys, values = (part.flatten(1).contiguous().numpy() for part in new)
        self._arenas.of(blocks).store(
            keys,
            values,
            batch.write_blocks.numpy(),
            batch.write_slots.numpy(),
        )

    def decode(
        self, rows: Tensor, blocks: LayerBlocks, batch: GroupBatch, masking: Masking, out: Tensor
    ) -> None:
        firsts = batch.decode_firsts
        self._arenas.of(blocks).decode(
            rows.contiguous().numpy(),
            (
                batch.decode_tables.numpy(),
                batch.decode_contexts.numpy(),
                None if firsts is None else firsts.numpy(),
            ),
            (masking.scale, masking.window or 0, masking.softcap or 0.0),
            NO_SINKS if masking.sinks is None else masking.sinks.float().numpy(),
            out.numpy(),
        )

    def chunk(
        self, rows: Tensor, blocks: LayerBlocks, span: Span, masking: Masking, out: Tensor
    ) -> None:
        windowed = masking.window is not None and masking.window < span.context
        # Torch's operator takes keys and values of one size; of multi-head latent attention
        # (DeepSeek) values are smaller.
        uneven = blocks.dims[0] != blocks.dims[1]
        if windowed or uneven or masking.softcap is not None or masking.sinks is not None:
            super().chunk(rows, blocks, span, masking, out)
            return
        own = slice(span.row, span.row + span.count)
        self._past_and_own(rows[own], blocks, span, masking.scale, out[own])

    def copied(
        self, blocks: LayerBlocks, wanted: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Where mlps and experts have theirs, who are not at work now."""
        shape = len(wanted), blocks.block_tokens, blocks.kv_heads
        keys, values = (self._memory.empty(*shape, dim) for dim in blocks.dims)
        self._arenas.of(blocks).load(wanted, keys, values)
        return keys, values

    def _past_and_own(
        self, rows: Tensor, blocks: LayerBlocks, span: Span, scale: float, out: Tensor
    ) -> None:
        """A chunk's attention in parts without a mask, which is twice as quick as one with it.

        Among themselves the rows are causal; all of them see all of the past, which is taken piece
        by piece, so that what this needs does not grow with the context. The answers are weighed by
        the sums of their exponentials, whose logarithms the operator returns. It makes them on the
        heap, so that it gets a few heads at a time.
        """
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        count, heads, width = rows.shape
        kv_heads, past = blocks.kv_heads, span.context - span.count
        groups = heads // kv_heads
        # Heads of one group are neighbours and share their keys: [kv_heads, groups, T, d].
        shape = kv_heads, groups, count, width
        queries = self._memory.rows(count, heads * width).view(shape)
        queries.copy_(rows.view(count, kv_heads, groups, width).permute(1, 2, 0, 3))
        answers = out.view(count, kv_heads, groups, -1).permute(1, 2, 0, 3)
        some = max(1, _ATTENDED // (groups * count * width))
        parts = [slice(first, first + some) for first in range(0, kv_heads, some)]
        sums = []
        seen = self.gathered(blocks, span.table, past, span.context, rows.dtype)
        for part in parts:
            own = (kv[:, part].transpose(0, 1)[:, None].expand(-1, groups, -1, -1) for kv in seen)
            answer, its_sums = attend(queries[part], *own, is_causal=True, scale=scale)
            answers[part] = answer
            sums.append(its_sums)
        piece = past_tokens(kv_heads * width)
        for first in range(0, past, piece):
            del seen  # before there is the next
            seen = self.gathered(blocks, span.table, first, min(first + piece, past), rows.dtype)
            for index, part in enumerate(parts):
                stacked = queries[part].view(1, -1, groups * count, width)
                old, old_sums = attend(
                    stacked, *(kv[:, part].transpose(0, 1)[None] for kv in seen), scale=scale
                )
                old_sums = old_sums.view(sums[index].shape)
                share = torch.sigmoid(old_sums - sums[index])[..., None]
                answers[part].lerp_(old.view(answers[part].shape), share)
                sums[index] = torch.logaddexp(sums[index], old_sums)


class _Quicker:
    """Our own kernels in the place of a model's modules, where they compute the same."""

    def __init__(self, memory: LayerMemory | None) -> None:
        self._memory = memory
        self._same: dict[object, bool] = {}  # by kind of norm: a model's layers are alike

    def __call__(self, module: nn.Module) -> nn.Module | None:
        """The same computation, or None where it would not be the same."""
        if (linear := products.linear_for(module, self._memory)) is not None:
            return linear
        if (parts := rms_norm_parts(module)) is None:
            return None
        weight, epsilon = parts
        norm, kind = RmsNorm(weight, epsilon, self._memory), (type(module), weight.shape, epsilon)
        if kind not in self._same:
            sample = torch.randn(2, weight.shape[0], generator=torch.Generator().manual_seed(0))
            self._same[kind] = torch.allclose(module(sample), norm(sample), rtol=1e-5, atol=1e-6)
        return norm if self._same[kind] else None


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight, in one pass instead of eight operators."""

    def __init__(
        self, weight: nn.Parameter | Tensor, epsilon: float, memory: LayerMemory | None = None
    ) -> None:
        super().__init__()
        self._memory = memory
        self.weight = weight
        self.variance_epsilon = epsilon

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` [..., width], each normalised."""
        flat = rows.reshape(-1, rows.shape[-1])
        out = torch.empty_like(flat) if self._memory is None else self._memory.rows(*flat.shape)
        cpu_loops.rms_norm(flat.numpy(), self.weight.numpy(), self.variance_epsilon, out.numpy())
        return out.view(rows.shape)


def warm_up(threads: int) -> None:
    """Compile, or load from the cache, before anybody waits and before memory is capped."""
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    for part in COMPILED:
        part()
    # With its first threads Numba tells OpenMP, and so torch, to use as many as there are cores.
    torch.set_num_threads(threads)


def _warm_up_rows() -> None:
    one = np.zeros((1, 1, 8), np.float32)
    cpu_loops.rms_norm(one[0], one[0, 0], 1e-6, np.empty_like(one[0]))
    products.warm_up()
    gguf_products.warm_up()
    cpu_layers.warm_up()
    state_kernels.warm_up()


# What compiles for about as long each, by processes at the same time.
COMPILED = arenas.warm_up, _warm_up_rows, layer_runs.warm_up
