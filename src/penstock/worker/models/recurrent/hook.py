"""Recurrent layers inside transformers' model code: their states come from slots and go there.

A mixer asks a cache for its state, and calls a convolution and a scan by name. During a step the
cache says that there is no past, so that a mixer computes all rows of a step at once, in the way
that it has for prompts; and the two functions, replaced by name in the module that the mixer was
written in, continue each sequence from its own slot. Outside a step nothing is different.

Rows that were generated are computed as `generate` computes them: it limits time steps in prompts
only, so that a row is told by what it is, not by the length of its chunk.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from penstock.worker.kv.layout.layer_states import StateGeometry
from penstock.worker.models.recurrent.kernels import Convolution, DeltaRule, SelectiveScan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.nn import Module

    from penstock.worker.kv.layout.layer_states import LayerStates
    from penstock.worker.models.recurrent.kernels import StateKernels
    from penstock.worker.models.recurrent.rows import StateRows

_NORM_EPSILON = 1e-6  # of queries and keys, in all scans that have them normalised
_NO_LIMIT = (0.0, float("inf"))


@dataclass(slots=True)
class StateRecording:
    """What a probe forward saw of recurrent layers."""

    layers: dict[int, StateGeometry] = field(default_factory=dict)
    unknown: set[int] = field(default_factory=set)  # layers that keep something in other ways
    limits: bool = False  # rows of a prompt are computed otherwise than generated ones


@dataclass(frozen=True, slots=True)
class StateStep:
    """A step's rows, with the memory and kernels that they are computed with."""

    rows: StateRows
    layers: Mapping[int, LayerStates]
    kernels: StateKernels


class StepCache(DynamicCache):  # type: ignore[misc]
    """What a model is given for a cache: nothing is in it, and it sees which layer is computed."""

    def __init__(self, step: StateStep | StateRecording) -> None:
        super().__init__()
        self.step = step
        self.layer = -1

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return False

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.layer = layer_idx
        if isinstance(self.step, StateRecording):
            # Until it is seen what is done with it; of several in one layer none is known.
            self.step.unknown.add(layer_idx)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        if isinstance(self.step, StateRecording):
            known = self.step.layers.get(layer_idx)
            if known is None or not known.matrices or state_idx:
                self.step.unknown.add(layer_idx)
        return recurrent_states


_current: ContextVar[StepCache | None] = ContextVar("penstock_states", default=None)


@contextmanager
def states_of(step: StateStep | StateRecording) -> Iterator[StepCache]:
    """A forward with this cache inside it continues the states of a step."""
    cache = StepCache(step)
    token = _current.set(cache)
    try:
        yield cache
    finally:
        _current.reset(token)


def cache_name(model: Module) -> str:
    """The name by which a model takes a cache."""
    names = inspect.signature(type(model).forward).parameters
    return "cache_params" if "cache_params" in names else "past_key_values"


def install(model: Module) -> bool:
    """Replace the functions in the modules that the model's parts were written in; whether there
    are any."""
    found = False
    for name in {type(module).__module__ for module in model.modules()}:
        code = sys.modules[name]
        for function, ours in _OURS.items():
            original = getattr(code, function, None)
            found |= original is not None
            if original is not None and not hasattr(original, "penstock"):
                setattr(code, function, _replaced(original, ours))
    return found


def _replaced(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
        cache = _current.get()
        if cache is None:
            return original(*arguments, **named)
        return ours(cache, original, *arguments, **named)

    call.penstock = True  # type: ignore[attr-defined]
    return call


def _convolve(
    cache: StepCache,
    original: Callable[..., Any],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **rest: Any,
) -> Tensor:
    step = cache.step
    if isinstance(step, StateRecording):
        _, channels, _ = hidden_states.shape
        dtype = str(hidden_states.dtype).removeprefix("torch.")
        if cache.layer not in step.layers:
            step.layers[cache.layer] = StateGeometry(channels, weight.shape[-1] - 1, dtype)
            step.unknown.discard(cache.layer)
        answer: Tensor = original(hidden_states, weight, bias, activation=activation, **rest)
        return answer
    by = Convolution(weight, bias, activation)
    return step.kernels.convolve(hidden_states, by, step.layers[cache.layer], step.rows)


def _delta_rule(  # noqa: PLR0913 - transformers' own signature
    cache: StepCache,
    original: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    step = cache.step
    if isinstance(step, StateRecording):
        _record(cache, step, (value.shape[2], key.shape[3], value.shape[3]))
        rest["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
        answer: tuple[Tensor, Tensor] = original(query, key, value, g=g, beta=beta, **rest)
        return answer
    parts = [part[0].float() for part in (query, key, value, g, beta)]
    if use_qk_l2norm_in_kernel:
        parts[:2] = (
            part * torch.rsqrt((part * part).sum(dim=-1, keepdim=True) + _NORM_EPSILON)
            for part in parts[:2]
        )
    parts[0] = parts[0] * query.shape[-1] ** -0.5
    layer = step.layers[cache.layer]
    out = step.kernels.delta_rule(DeltaRule(*parts), layer, step.rows, original)
    return out[None].to(query.dtype), _nothing(out)


def _selective_scan(  # noqa: PLR0913 - transformers' own signature
    cache: StepCache,
    original: Callable[..., Any],
    hidden_states: Tensor,  # [1, T, heads, head_dim]
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    step = cache.step
    if isinstance(step, StateRecording):
        _record(cache, step, (*hidden_states.shape[2:], B.shape[3]))
        step.limits |= tuple(dt_limit) != _NO_LIMIT
        rest |= {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        answer: tuple[Tensor, Tensor] = original(hidden_states, dt, A, B, C, chunk_size, **rest)
        return answer
    steps = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
    steps = F.softplus(steps) if dt_softplus else steps
    for span in step.rows.chunks:
        prompt = steps[span.row : span.row + span.prompt_rows]
        prompt.clamp_(min=dt_limit[0], max=dt_limit[1])
    scan = SelectiveScan(hidden_states[0], steps, A, B[0], C[0], D)
    layer = step.layers[cache.layer]
    out = step.kernels.selective_scan(scan, layer, step.rows, original)
    return out[None], _nothing(out)


def _nothing(like: Tensor) -> Tensor:
    """For the state behind the last row, which is in its slot."""
    return like.new_empty(0)


def _record(cache: StepCache, step: StateRecording, matrices: tuple[int, ...]) -> None:
    known = step.layers.get(cache.layer)
    if known is None or known.matrices:  # no convolution before it, or a second scan
        step.unknown.add(cache.layer)
        return
    step.layers[cache.layer] = StateGeometry(
        known.channels, known.columns, known.dtype, tuple(matrices)
    )


_OURS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _selective_scan,
}
