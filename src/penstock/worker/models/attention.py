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


IMPLEMENTATION = "penstock"


@dataclass(slots=True)
class Recording:
    """What a probe forward saw: the geometry of each layer that called us."""

    layers: dict[int, LayerGeometry] = field(default_factory=dict)


class LayerBlocks(Protocol):
    """Where KV lies: the arena."""

    keys: list[Tensor]  # per layer
    values: list[Tensor]


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step's batch with the memory and kernels it runs on."""

    batch: Any  # as the kernels' runner lays it out
    arena: LayerBlocks
    kernels: Kernels
    windows: tuple[int | None, ...]  # per layer, where the model itself passes none
    slots: dict[int, int]  # the model's layer index -> the arena's

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer in the arena."""
        slot = self.slots[layer]
        return self.arena.keys[slot], self.arena.values[slot]


_current: ContextVar[PagedStep | Recording | None] = ContextVar("penstock_step", default=None)


@contextmanager
def running(step: PagedStep | Recording) -> Iterator[None]:
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
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    rows, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))  # [T, heads, d]
    if isinstance(step, Recording):
        step.layers[layer] = LayerGeometry(keys.shape[1], keys.shape[2], values.shape[2])
        masking = Masking(scale, sliding_window, softcap, s_aux)
        return reference.attend(rows, keys, values, masking)[None], None
    window = sliding_window if sliding_window is not None else step.windows[layer]
    masking = Masking(scale, window, softcap, s_aux)
    blocks = step.blocks(layer)
    return step.kernels.attend(rows, (keys, values), blocks, step.batch, masking)[None], None


def register() -> None:
    """Make `attn_implementation="penstock"` known to transformers."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
