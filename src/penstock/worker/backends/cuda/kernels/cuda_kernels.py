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

from penstock.worker.backends.cuda.kernels import (
    products,
    triton_attention,
    triton_chunks,
    triton_kv,
    triton_layer,
)
from penstock.worker.backends.cuda.kernels.experts import (
    FewRowsExperts,
    FewRowsRouter,
    relative_error,
)
from penstock.worker.backends.cuda.kernels.paging import Paging, chunk_tiling
from penstock.worker.backends.cuda.kernels.triton_attention import Scratch
from penstock.worker.kv.layout.layer_blocks import LayerBlocks
from penstock.worker.models import attention, fusions
from penstock.worker.models.fusions import SAMPLE_TOKENS, TOLERANCE
from penstock.worker.models.kernels.interface import Masking
from penstock.worker.models.recurrent.kernels import ReferenceStates
from penstock.worker.models.replacing import replace_modules, rms_norm_parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from penstock.worker.backends.cuda.paged_batch import PagedGroup
    from penstock.worker.models.fusions import PackedLayer
    from penstock.worker.models.linear import LinearWeight
    from penstock.worker.models.recurrent.kernels import StateKernels

log = logging.getLogger(__name__)

_EARLY_ROWS = 32  # a kernel starts before the last one's end: measured, no gain beyond
_SAMPLE_BLOCK = 16


class CudaKernels:
    """Triton over the arena."""

    states: StateKernels = ReferenceStates()

    def __init__(self) -> None:
        self._scratch: Scratch | None = None

    def prepare(self, device: torch.device, items: int, decodes: int) -> None:
        """Say how many work items and decodes a step can have."""
        self._scratch = Scratch(device, items, decodes)

    def adopt(self, model: PreTrainedModel) -> None:
        """Norms, layers of the common shape, experts, single-row products; each only if equal."""
        replace_modules(model, _quicker_norm)
        tiled, packed = products.tile_weights(model)
        if packed:
            log.info("%d of %d packed weights are multiplied by their codes", tiled, packed)
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
        outside = set(model.modules()) - fused_inside
        replace_modules(
            model, lambda module: products.linear_for(module) if module in outside else None
        )
        log.info("%d of %d layers of the common shape are fused", taken, found)

    def attend(
        self,
        rows: Tensor,
        new: tuple[Tensor, Tensor],
        blocks: LayerBlocks,
        batch: PagedGroup,
        masking: Masking,
    ) -> Tensor:
        """Any mixture of decodes and chunks: three launches."""
        new_keys, new_values = (part if part.stride(2) == 1 else part.contiguous() for part in new)
        triton_kv.store(new_keys, new_values, blocks, batch.paging.slots)
        rows = rows if rows.stride(2) == 1 else rows.contiguous()
        return self.seen(rows, blocks, batch.paging, masking)

    def seen(
        self,
        rows: Tensor,
        blocks: LayerBlocks,
        paging: Paging,
        masking: Masking,
        early: bool = False,
    ) -> Tensor:
        """Attention of rows whose own KV is in its place."""
        out = rows.new_empty(rows.shape[0], rows.shape[1], blocks.dims[1])
        if paging.decodes:
            assert self._scratch is not None
            triton_attention.decode(rows, blocks, paging, masking, out, self._scratch, early)
        if paging.tiles.shape[1]:
            triton_chunks.chunks(rows, blocks, paging, masking, out)
        return out


class FusedLayer:
    """A layer of the common shape over packed weights; outside a step, the layer's own forward."""

    def __init__(self, layer: PackedLayer, kernels: CudaKernels) -> None:
        self._layer = layer
        self._kernels = kernels
        self._plain = fusions.own_forward(layer)
        self._launches_early = triton_layer.dependent_launches(layer.qkv.device)
        mlp = () if isinstance(layer.mlp, nn.Module) else (layer.mlp.gate_up, layer.mlp.down)
        self._has_one_row = all(map(products.has_one_row, (layer.qkv, layer.out, *mlp)))

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
        paging: Paging = step.group(layer.index).paging
        window = layer.window if layer.window is not None else step.windows[layer.index]
        masking = Masking(layer.scaling, window)
        blocks = step.blocks(layer.index)
        if x.shape[0] == 1 and self._has_one_row:
            self._one_row(x, (cos, sin), blocks, paging, masking)
        else:
            self._rows(x, (cos, sin), blocks, paging, masking)
        return x[None]

    def _one_row(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        blocks: LayerBlocks,
        paging: Paging,
        masking: Masking,
    ) -> None:
        layer, early = self._layer, self._launches_early
        packed = products.one_row(
            x,
            layer.qkv,
            layer.qkv_bias,
            norm=layer.attention_norm,
            epsilon=layer.epsilon,
            early=early,
        )
        rows = triton_layer.rotate_and_store(
            packed, angles, layer.head_norms, layer.epsilon, blocks, paging.slots, early
        )
        seen = self._kernels.seen(rows, blocks, paging, masking, early)
        products.one_row(seen.view(1, -1), layer.out, residual=x, early=early)
        if isinstance(layer.mlp, nn.Module):
            normed = triton_layer.rms_norm(x, layer.mlp_norm, layer.epsilon, early)
            x += layer.mlp(normed[None])[0]
            return
        inner = products.one_row(
            x,
            layer.mlp.gate_up,
            norm=layer.mlp_norm,
            epsilon=layer.epsilon,
            gated=True,
            early=early,
        )
        products.one_row(inner, layer.mlp.down, residual=x, early=early)

    def _rows(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        blocks: LayerBlocks,
        paging: Paging,
        masking: Masking,
    ) -> None:
        layer = self._layer
        early = self._launches_early and x.shape[0] <= _EARLY_ROWS
        normed = triton_layer.rms_norm(x, layer.attention_norm, layer.epsilon, early)
        packed = layer.qkv.product(normed, layer.qkv_bias)
        rows = triton_layer.rotate_and_store(
            packed, angles, layer.head_norms, layer.epsilon, blocks, paging.slots, early
        )
        seen = self._kernels.seen(rows, blocks, paging, masking, early)
        layer.out.multiply_add(seen.flatten(1), x)  # the product adds the residual itself
        normed = triton_layer.rms_norm(x, layer.mlp_norm, layer.epsilon, early)
        if isinstance(layer.mlp, nn.Module):
            x += layer.mlp(normed[None])[0]
            return
        packed = layer.mlp.gate_up.product(normed)
        layer.mlp.down.multiply_add(triton_layer.silu_mul(packed, early), x)


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight, in one pass."""

    def __init__(self, weight: nn.Parameter | Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = epsilon

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` [..., width], each normalised."""
        return triton_layer.rms_norm(rows, self.weight, self.variance_epsilon)


def _return_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _quicker_norm(module: nn.Module) -> nn.Module | None:
    """The same computation by our own kernel, or None where it would not be the same."""
    if (parts := rms_norm_parts(module)) is None:
        return None
    weight, epsilon = parts
    norm = RmsNorm(weight, epsilon)
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(2, weight.shape[0], generator=generator).to(weight)
    return norm if relative_error(norm(sample), module(sample)) <= TOLERANCE[weight.dtype] else None


@dataclass(frozen=True, slots=True)
class _SampleMemory:
    """Blocks for one layer and a few tokens."""

    own: LayerBlocks

    def blocks(self, layer: int) -> LayerBlocks:
        return self.own

    def group_of(self, layer: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class _SampleGroup:
    paging: Paging


@dataclass(frozen=True, slots=True)
class _SampleBatch:
    groups: tuple[_SampleGroup]


@torch.inference_mode()
def _answers_alike(layer: PackedLayer, fused: FusedLayer) -> bool:
    """Whether a layer gives its own answers on a sample when computed over blocks."""
    weight, count = layer.qkv, SAMPLE_TOKENS
    x, call = fusions.sample_call(layer.module, torch.arange(count))
    kv_heads = (weight.shape[0] - layer.out.shape[1]) // (2 * layer.head_dim)
    shape = (-(-count // _SAMPLE_BLOCK), _SAMPLE_BLOCK, kv_heads, layer.head_dim)
    keys, values = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in "kv")
    step = attention.PagedStep(
        _SampleBatch((_SampleGroup(_one_chunk(count, weight, layer.head_dim)),)),
        _SampleMemory(LayerBlocks(keys, values)),
        fused._kernels,
        (None,) * (layer.index + 1),
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


def _one_chunk(count: int, weight: LinearWeight, width: int) -> Paging:
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
