"""What a GPU does better than transformers' own operators: attention in place, and fewer launches.

A decode step reads every weight once and is over in milliseconds, so what counts is that memory is
never idle: layers of the common shape run as ten launches, or seven for a single row, instead of
some thirty.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.worker.models import attention, fusions
from penstock.worker.models.fusions import SAMPLE_TOKENS, TOLERANCE
from penstock.worker.models.kernels import triton_attention, triton_chunks, triton_layer
from penstock.worker.models.kernels.cuda_experts import (
    FewRowsExperts,
    FewRowsRouter,
    relative_error,
)
from penstock.worker.models.kernels.interface import Masking
from penstock.worker.models.kernels.paging import Paging, chunk_tiling
from penstock.worker.models.kernels.triton_attention import Scratch

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from penstock.worker.engine.paged_batch import PagedBatch
    from penstock.worker.models.fusions import PackedLayer

log = logging.getLogger(__name__)

_EARLY_ROWS = 32  # a kernel starts before the last one's end: measured, no gain beyond
_SAMPLE_BLOCK = 16


class CudaKernels:
    """Triton over the arena."""

    def __init__(self) -> None:
        self._scratch: Scratch | None = None

    def prepare(self, device: torch.device, items: int, decodes: int) -> None:
        """Say how many work items and decodes a step can have."""
        self._scratch = Scratch(device, items, decodes)

    def adopt(self, model: PreTrainedModel) -> None:
        """Norms, layers of the common shape, experts, single-row products; each only if equal."""
        _swap(model, _quicker_norm)
        found = taken = 0
        fused_inside: set[nn.Module] = set()
        for layer in fusions.packed_layers(model):
            found += 1
            _return_memory(layer.qkv.device)  # the parts are free, in pieces too small for the next
            fused = FusedLayer(layer, self)
            if _answers_alike(layer, fused):
                fusions.install(layer, fused)
                taken += 1
                fused_inside.update(layer.module.modules())
        for module in model.modules():
            if (quicker := FewRowsExperts.of(module) or FewRowsRouter.of(module)) is not None:
                module.forward = quicker
        plain = {m for m in model.modules() if type(m) is nn.Linear} - fused_inside
        _swap(model, lambda module: OneRowLinear(module) if module in plain else None)
        log.info("%d of %d layers of the common shape are fused", taken, found)

    def attend(
        self,
        rows: Tensor,
        new: tuple[Tensor, Tensor],
        blocks: tuple[Tensor, Tensor],
        batch: PagedBatch,
        masking: Masking,
    ) -> Tensor:
        """Any mixture of decodes and chunks: three launches."""
        new_keys, new_values = (part if part.stride(2) == 1 else part.contiguous() for part in new)
        triton_attention.store(new_keys, new_values, *blocks, batch.paging.slots)
        rows = rows if rows.stride(2) == 1 else rows.contiguous()
        return self.seen(rows, blocks, batch.paging, masking)

    def seen(
        self,
        rows: Tensor,
        blocks: tuple[Tensor, Tensor],
        paging: Paging,
        masking: Masking,
        early: bool = False,
    ) -> Tensor:
        """Attention of rows whose own KV is in its place."""
        out = rows.new_empty(rows.shape[0], rows.shape[1], blocks[1].shape[3])
        if paging.decodes:
            assert self._scratch is not None
            triton_attention.decode(rows, *blocks, paging, masking, out, self._scratch, early)
        if paging.tiles.shape[1]:
            triton_chunks.chunks(rows, *blocks, paging, masking, out)
        return out


class FusedLayer:
    """A layer of the common shape over packed weights; outside a step, the layer's own forward."""

    def __init__(self, layer: PackedLayer, kernels: CudaKernels) -> None:
        self._layer = layer
        self._kernels = kernels
        self._plain = fusions.own_forward(layer)
        self._launches_early = triton_layer.dependent_launches(layer.qkv.device)

    def __call__(
        self, hidden_states: Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any
    ) -> Tensor:
        step = attention.current_step()
        layer = self._layer
        turns = position_embeddings if isinstance(position_embeddings, tuple) else None
        if step is None or turns is None or turns[0].shape[-1] != layer.head_dim:
            return self._plain(
                hidden_states, *args, position_embeddings=position_embeddings, **kwargs
            )
        cos, sin = (part[0] for part in turns)
        x = hidden_states[0]  # of the layer before, or fresh from the embedding: written in place
        paging = step.batch.paging
        window = layer.window if layer.window is not None else step.windows[layer.index]
        masking = Masking(layer.scaling, window)
        blocks = step.blocks(layer.index)
        if x.shape[0] == 1:
            self._one_row(x, (cos, sin), blocks, paging, masking)
        else:
            self._rows(x, (cos, sin), blocks, paging, masking)
        return x[None]

    def _one_row(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        blocks: tuple[Tensor, Tensor],
        paging: Paging,
        masking: Masking,
    ) -> None:
        layer, early = self._layer, self._launches_early
        packed = triton_layer.one_row(
            x, layer.qkv, layer.qkv_bias, layer.attention_norm, layer.epsilon, early=early
        )
        rows = triton_layer.rotate_and_store(
            packed, angles, layer.head_norms, layer.epsilon, *blocks, paging.slots, early
        )
        seen = self._kernels.seen(rows, blocks, paging, masking, early)
        triton_layer.one_row(seen.view(1, -1), layer.out, residual=x, early=early)
        if isinstance(layer.mlp, nn.Module):
            normed = triton_layer.rms_norm(x, layer.mlp_norm, layer.epsilon, early)
            x += layer.mlp(normed[None])[0]
            return
        inner = triton_layer.one_row(
            x,
            layer.mlp.gate_up,
            norm=layer.mlp_norm,
            epsilon=layer.epsilon,
            gated=True,
            early=early,
        )
        triton_layer.one_row(inner, layer.mlp.down, residual=x, early=early)

    def _rows(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        blocks: tuple[Tensor, Tensor],
        paging: Paging,
        masking: Masking,
    ) -> None:
        layer = self._layer
        early = self._launches_early and x.shape[0] <= _EARLY_ROWS
        normed = triton_layer.rms_norm(x, layer.attention_norm, layer.epsilon, early)
        packed = nn.functional.linear(normed, layer.qkv, layer.qkv_bias)
        rows = triton_layer.rotate_and_store(
            packed, angles, layer.head_norms, layer.epsilon, *blocks, paging.slots, early
        )
        seen = self._kernels.seen(rows, blocks, paging, masking, early)
        x.addmm_(seen.flatten(1), layer.out.t())  # the product adds the residual itself
        normed = triton_layer.rms_norm(x, layer.mlp_norm, layer.epsilon, early)
        if isinstance(layer.mlp, nn.Module):
            x += layer.mlp(normed[None])[0]
            return
        packed = nn.functional.linear(normed, layer.mlp.gate_up)
        x.addmm_(triton_layer.silu_mul(packed, early), layer.mlp.down.t())


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight, in one pass."""

    def __init__(self, weight: nn.Parameter | Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = epsilon

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` [..., width], each normalised."""
        return triton_layer.rms_norm(rows, self.weight, self.variance_epsilon)


class OneRowLinear(nn.Linear):
    """A linear layer whose product of a single row is ours. Shares the weight it replaces."""

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.weight = plain.weight
        self.bias = plain.bias

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` [..., in] times the weight."""
        if rows.numel() != self.in_features:
            return nn.functional.linear(rows, self.weight, self.bias)
        row = rows.reshape(1, self.in_features)
        return triton_layer.one_row(row, self.weight, self.bias).view(*rows.shape[:-1], -1)


def _swap(model: nn.Module, better: Callable[[Any], nn.Module | None]) -> None:
    """Put what `better` makes of a module in its place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (other := better(child)) is not None:
                setattr(parent, name, other)


def _return_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _quicker_norm(module: nn.Module) -> nn.Module | None:
    """The same computation by our own kernel, or None where it would not be the same."""
    if not type(module).__name__.endswith("RMSNorm"):
        return None
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    # Architectures differ in what they call by this name: only equal answers count.
    norm = RmsNorm(weight, epsilon)
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(2, weight.shape[0], generator=generator).to(weight)
    return norm if relative_error(norm(sample), module(sample)) <= TOLERANCE[weight.dtype] else None


@dataclass(slots=True)
class _SampleArena:
    """Blocks for one layer and a few tokens."""

    keys: list[Tensor]
    values: list[Tensor]


@dataclass(frozen=True, slots=True)
class _SampleBatch:
    paging: Paging


@torch.inference_mode()
def _answers_alike(layer: PackedLayer, fused: FusedLayer) -> bool:
    """Whether a layer gives its own answers on a sample when computed over blocks."""
    weight, count = layer.qkv, SAMPLE_TOKENS
    x, call = fusions.sample_call(layer.module, torch.arange(count))
    kv_heads = (weight.shape[0] - layer.out.shape[1]) // (2 * layer.head_dim)
    shape = (-(-count // _SAMPLE_BLOCK), _SAMPLE_BLOCK, kv_heads, layer.head_dim)
    keys, values = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in "kv")
    step = attention.PagedStep(
        _SampleBatch(_one_chunk(count, weight, layer.head_dim)),
        _SampleArena([keys], [values]),
        fused._kernels,
        (None,) * (layer.index + 1),
        {layer.index: 0},
    )
    try:
        with attention.running(attention.Recording()):
            theirs = own_answer = fusions.own_forward(layer)(x.clone(), **call)
        with attention.running(step):
            ours = fused(x.clone(), **call)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        log.debug("layer %d is not fused: %s", layer.index, error)
        return False
    if isinstance(own_answer, tuple):
        theirs = own_answer[0]
        if len(own_answer) > 1:
            return False
    return relative_error(ours - x, theirs - x) <= TOLERANCE[weight.dtype]


def _one_chunk(count: int, weight: Tensor, width: int) -> Paging:
    tile_rows = chunk_tiling(width, weight.dtype).rows

    def numbers(values: Any) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.int32)).to(weight.device)

    return Paging(
        tables=numbers(range(-(-count // _SAMPLE_BLOCK))),
        starts=numbers([0]),
        contexts=numbers([count]),
        slots=numbers(range(count)),
        items=numbers(np.zeros((4, 0))),
        counts=numbers([0]),
        tiles=numbers(
            [(0, first, 0, count) for first in range(0, count, tile_rows)]
        ).T.contiguous(),
        decodes=0,
    )
