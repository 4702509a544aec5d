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

from penstock.worker.models.kernels import cpu_layers, cpu_loops
from penstock.worker.models.kernels.cpu_memory import LayerMemory, past_tokens
from penstock.worker.models.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.worker.engine.batch import Batch, Span
    from penstock.worker.models.kernels.interface import Masking

numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

_NO_SINKS = np.zeros(0, np.float32)
_FEW = range(3, 49)  # rows; measured: below and above torch is as good
_WIDE = 8192  # weights
_ATTENDED = 1 << 19  # numbers of the answers that attention makes at once
_TILE = 4  # rows and weights of one tile: 16 sums stay in registers


class CpuKernels(ReferenceKernels):
    """float32 decode by Numba; chunks go through torch, whose matrix products are better there."""

    def __init__(self) -> None:
        self._flat: dict[int, NDArray[np.float32]] = {}
        self._memory = LayerMemory()
        warm_up(torch.get_num_threads())

    def adopt(self, model: nn.Module) -> None:
        """Send what our kernels do better to them; weights stay where they are."""
        cpu_layers.adopt_sums(model)
        cpu_layers.adopt_rotation(model, self._memory)
        # First, since its parts must still be plain.
        cpu_layers.adopt_mlps(model, self._memory)
        cpu_layers.adopt_experts(model, self._memory)
        self._memory.end_behind(model)
        for part in getattr(model, "base_model", model).children():
            _replace(part, _Quicker(self._memory))
        # The last norm and the head, whose answers outlive the layers' memory.
        _replace(model, _Quicker(None))

    def answers(self, rows: Tensor, width: int) -> Tensor:
        count, heads = rows.shape[:2]
        return self._memory.rows(count, heads * width).view(count, heads, width)

    def store(
        self, new_keys: Tensor, new_values: Tensor, keys: Tensor, values: Tensor, batch: Batch
    ) -> None:
        cpu_loops.store(
            new_keys.flatten(1).contiguous().numpy(),
            new_values.flatten(1).contiguous().numpy(),
            self._arena(keys),
            (keys.storage_offset(), values.storage_offset(), keys.stride(0)),
            batch.write_blocks.numpy(),
            batch.write_slots.numpy(),
        )

    def decode(
        self,
        rows: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: Batch,
        masking: Masking,
        out: Tensor,
    ) -> None:
        cpu_loops.decode(
            rows.contiguous().numpy(),
            self._arena(keys),
            (keys.storage_offset(), values.storage_offset(), keys.stride(0)),
            (keys.shape[1], keys.shape[2], values.shape[3]),
            batch.decode_tables.numpy(),
            batch.decode_contexts.numpy(),
            (masking.scale, masking.window or 0, masking.softcap or 0.0),
            _NO_SINKS if masking.sinks is None else masking.sinks.float().numpy(),
            out.numpy(),
        )

    def chunk(
        self, rows: Tensor, keys: Tensor, values: Tensor, span: Span, masking: Masking, out: Tensor
    ) -> None:
        windowed = masking.window is not None and masking.window < span.context
        # Torch's operator takes keys and values of one size; of multi-head latent attention
        # (DeepSeek) values are smaller.
        uneven = keys.shape[3] != values.shape[3]
        if windowed or uneven or masking.softcap is not None or masking.sinks is not None:
            super().chunk(rows, keys, values, span, masking, out)
            return
        own = slice(span.row, span.row + span.count)
        self._past_and_own(rows[own], (keys, values), span, masking.scale, out[own])

    def copied(self, blocks: tuple[Tensor, Tensor], wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Where mlps and experts have theirs, who are not at work now."""
        keys, values = (
            torch.index_select(
                part, 0, wanted, out=self._memory.empty(len(wanted), *part.shape[1:])
            )
            for part in blocks
        )
        return keys, values

    def _past_and_own(
        self, rows: Tensor, blocks: tuple[Tensor, Tensor], span: Span, scale: float, out: Tensor
    ) -> None:
        """A chunk's attention in parts without a mask, which is twice as quick as one with it.

        Among themselves the rows are causal; all of them see all of the past, which is taken piece
        by piece, so that what this needs does not grow with the context. The answers are weighed by
        the sums of their exponentials, whose logarithms the operator returns. It makes them on the
        heap, so that it gets a few heads at a time.
        """
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        count, heads, width = rows.shape
        kv_heads, past = blocks[0].shape[2], span.context - span.count
        groups = heads // kv_heads
        # Heads of one group are neighbours and share their keys: [kv_heads, groups, T, d].
        shape = kv_heads, groups, count, width
        queries = self._memory.rows(count, heads * width).view(shape)
        queries.copy_(rows.view(count, kv_heads, groups, width).permute(1, 2, 0, 3))
        answers = out.view(count, kv_heads, groups, -1).permute(1, 2, 0, 3)
        some = max(1, _ATTENDED // (groups * count * width))
        parts = [slice(first, first + some) for first in range(0, kv_heads, some)]
        sums = []
        seen = self.gathered(blocks, span.table, past, span.context)
        for part in parts:
            own = (kv[:, part].transpose(0, 1)[:, None].expand(-1, groups, -1, -1) for kv in seen)
            answer, its_sums = attend(queries[part], *own, is_causal=True, scale=scale)
            answers[part] = answer
            sums.append(its_sums)
        piece = past_tokens(kv_heads * width)
        for first in range(0, past, piece):
            del seen  # before there is the next
            seen = self.gathered(blocks, span.table, first, min(first + piece, past))
            for index, part in enumerate(parts):
                stacked = queries[part].view(1, -1, groups * count, width)
                old, old_sums = attend(
                    stacked, *(kv[:, part].transpose(0, 1)[None] for kv in seen), scale=scale
                )
                old_sums = old_sums.view(sums[index].shape)
                share = torch.sigmoid(old_sums - sums[index])[..., None]
                answers[part].lerp_(old.view(answers[part].shape), share)
                sums[index] = torch.logaddexp(sums[index], old_sums)

    def _arena(self, view: Tensor) -> NDArray[np.float32]:
        """The whole arena as one flat array: contiguous, so that loops over it vectorise."""
        storage = view.untyped_storage()
        flat = self._flat.get(storage.data_ptr())
        if flat is None:
            flat = torch.empty(0, dtype=view.dtype).set_(storage).numpy()
            self._flat = {storage.data_ptr(): flat}
        return flat


def _replace(model: nn.Module, quicker: Callable[[nn.Module], nn.Module | None]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (replacement := quicker(child)) is not None:
                setattr(parent, name, replacement)


class _Quicker:
    """Our own kernels in the place of a model's modules, where they compute the same."""

    def __init__(self, memory: LayerMemory | None) -> None:
        self._memory = memory
        self._same: dict[object, bool] = {}  # by kind of norm: a model's layers are alike

    def __call__(self, module: nn.Module) -> nn.Module | None:
        """The same computation, or None where it would not be the same."""
        # A subclass computes something else; the kernel takes weights in whole tiles.
        if type(module) is nn.Linear:
            return FewRowsLinear(module, self._memory) if module.out_features % _TILE == 0 else None
        if not type(module).__name__.endswith("RMSNorm"):
            return None
        weight = getattr(module, "weight", None)
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
            return None
        norm, kind = RmsNorm(weight, epsilon, self._memory), (type(module), weight.shape, epsilon)
        # Architectures differ in what they call by this name: only equal answers count.
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


class FewRowsLinear(nn.Module):
    """A linear layer that shares its weight with the plain one it replaces.

    A decode step multiplies each weight with one row per running request. torch's product is good
    for one or two rows and for many, and poor between.
    """

    def __init__(self, plain: nn.Linear, memory: LayerMemory | None = None) -> None:
        super().__init__()
        self._memory = memory
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.weight = plain.weight
        self.bias = plain.bias

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` [..., in] times the weight."""
        count = rows.numel() // self.in_features
        if count > _FEW[-1] and self.out_features > _WIDE:
            return self._in_slices(rows.reshape(count, -1)).view(*rows.shape[:-1], -1)
        if count > _FEW[-1] and self._memory is not None:
            answer = self._memory.rows(count, self.out_features)
            torch.mm(rows.reshape(count, -1), self.weight.t(), out=answer)
            if self.bias is not None:
                answer.add_(self.bias)
            return answer.view(*rows.shape[:-1], -1)
        if count not in _FEW:
            return nn.functional.linear(rows, self.weight, self.bias)
        answer = few_rows(rows.reshape(count, self.in_features), self.weight)
        if self.bias is not None:
            answer = answer + self.bias
        return answer.view(*rows.shape[:-1], self.out_features)

    def _in_slices(self, rows: Tensor) -> Tensor:
        """A vocabulary's logits: for some numbers of rows the whole product takes them twice."""
        answer = rows.new_empty(len(rows), self.out_features)
        for start in range(0, self.out_features, _WIDE):
            some = slice(start, start + _WIDE)
            torch.mm(rows, self.weight[some].t(), out=answer[:, some])
        return answer if self.bias is None else answer.add_(self.bias)


def few_rows(rows: Tensor, weight: Tensor) -> Tensor:
    """`rows` [M, in] times `weight` [out, in] transposed, float32: for 3 to about 48 rows."""
    count = rows.shape[0]
    padded = -(-count // _TILE) * _TILE
    if padded != count or not rows.is_contiguous():
        rows = nn.functional.pad(rows, (0, 0, 0, padded - count)).contiguous()
    out = rows.new_empty(padded, weight.shape[0])
    cpu_loops.few_rows(rows.numpy(), weight.numpy(), out.numpy(), numba.get_num_threads())
    return out[:count]


def warm_up(threads: int) -> None:
    """Compile, or load from the cache, before anybody waits and before memory is capped."""
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    one = np.zeros((1, 1, 8), np.float32)
    table, context = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    flat = np.zeros(16, np.float32)
    shapes = ((0, 8, 16), (1, 1, 8), table, context, (1.0, 0, 0.0))
    cpu_loops.decode(one, flat, *shapes, _NO_SINKS, np.empty_like(one))
    cpu_loops.store(one[0], one[0], flat, (0, 8, 16), np.zeros(1, np.int64), np.zeros(1, np.int64))
    cpu_loops.rms_norm(one[0], one[0, 0], 1e-6, np.empty_like(one[0]))
    few_rows(torch.zeros(_TILE, 8), torch.zeros(_TILE, 8))
    cpu_layers.warm_up()
