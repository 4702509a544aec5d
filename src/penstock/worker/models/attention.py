"""Penstock's attention inside transformers' model code: KV goes to the arena and comes from it.

transformers calls `_attention` in every layer because the model was built with
`attn_implementation="penstock"`. What a row may see is told by the current batch, which travels
in a context variable: some architectures drop extra keyword arguments on the way down.
No mask function is registered under that name, so transformers builds no mask. What an
architecture expresses only in its mask must therefore be known here (`windows`), and the
self-check at load compares with the model's own attention.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from transformers import AttentionInterface

from penstock.worker.kv.arena import LayerGeometry
from penstock.worker.models.kernels import reference
from penstock.worker.models.kernels.interface import Kernels, Masking

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from penstock.worker.kv.layout.layer_blocks import LayerBlocks
    from penstock.worker.models.kernels.flat import FlatAttention, Spans


IMPLEMENTATION = "penstock"


@dataclass(slots=True)
class Recording:
    """What a probe forward saw: the geometry of each layer that called us."""

    layers: dict[int, LayerGeometry] = field(default_factory=dict)


class StepMemory(Protocol):
    """Where KV lies."""

    def blocks(self, layer: int) -> LayerBlocks:
        """Keys and values of a layer of the model."""

    def group_of(self, layer: int) -> int:
        """The group whose tables a layer reads."""


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step's batch with the memory and kernels it runs on."""

    batch: Any  # as the kernels' runner lays it out
    memory: StepMemory
    kernels: Kernels
    windows: tuple[int | None, ...]  # per layer, where the model itself passes none

    def blocks(self, layer: int) -> LayerBlocks:
        """Keys and values of a layer."""
        return self.memory.blocks(layer)

    def group(self, layer: int) -> Any:
        """The batch as a layer's group has it."""
        return self.batch.groups[self.memory.group_of(layer)]


@dataclass(slots=True)
class FlatStep:
    """Whole texts side by side, of which nothing is kept: each sees itself and no other."""

    spans: Spans
    attend: FlatAttention
    causal: bool | None = None  # as the configuration has it; None: as each layer says
    calls: int = 0  # of layers, counted


_current: ContextVar[PagedStep | FlatStep | Recording | None] = ContextVar(
    "penstock_step", default=None
)


@contextmanager
def running(step: PagedStep | FlatStep | Recording) -> Iterator[None]:
    """Attention calls inside belong to this step."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def current_step() -> PagedStep | None:
    """The step whose forward this is; None in a forward of the model's own."""
    step = _current.get()
    return step if isinstance(step, PagedStep) else None


def _attention(  # noqa: PLR0913 - transformers' own signature
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, T, key_dim]
    key: Tensor,  # [1, kv_heads, T, key_dim]
    value: Tensor,  # [1, kv_heads, T, value_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    step = _current.get()
    if step is None:
        raise RuntimeError("attention outside a step: the model was called past the runner")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    rows, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))  # [T, heads, d]
    if isinstance(step, FlatStep):
        step.calls += 1
        causal = getattr(module, "is_causal", True) if step.causal is None else step.causal
        masking = Masking(scale, sliding_window, softcap, s_aux)
        return step.attend(rows, keys, values, step.spans, masking, bool(causal))[None], None
    layer: int = module.layer_idx  # type: ignore[assignment]
    if isinstance(step, Recording):
        step.layers[layer] = LayerGeometry(keys.shape[1], keys.shape[2], values.shape[2])
        masking = Masking(scale, sliding_window, softcap, s_aux)
        return reference.attend(rows, keys, values, masking)[None], None
    window = sliding_window if sliding_window is not None else step.windows[layer]
    masking = Masking(scale, window, softcap, s_aux)
    blocks, batch = step.blocks(layer), step.group(layer)
    return step.kernels.attend(rows, (keys, values), blocks, batch, masking)[None], None


def register() -> None:
    """Make `attn_implementation="penstock"` known to transformers."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
