"""A step of single rows through all layers of the common shape, in one compiled call.

What a layer is made of is found by structure and compared with the layer's own answers at load.
Chunks, steps of many rows and layers that differ go the way they went.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numba
import torch
from torch import Tensor, nn

from penstock.worker.backends.cpu.kernels.gguf_products import converts_halves
from penstock.worker.backends.cpu.kernels.one_call.layer_runs import (
    Run,
    Scratch,
    Shape,
    entry_of,
    weights_of,
)
from penstock.worker.kv.layout.layer_blocks import LayerBlocks
from penstock.worker.models import attention, fusions
from penstock.worker.models.attention import PagedStep
from penstock.worker.models.batch import GroupBatch
from penstock.worker.models.kernels import reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.worker.models.fusions import PackedLayer
    from penstock.worker.models.kernels.interface import Masking

    _Seen = tuple[Tensor, Tensor]  # a tensor, and a copy of what was in it
    _Call = tuple[PackedLayer, _Seen, _Seen, Any]  # rows, answer and angles

log = logging.getLogger(__name__)

_TOLERANCE = 1e-4  # of an answer's norm, on a sample
_SAMPLE_TOKENS, _SAMPLE_BLOCK = 4, 16


class FusedLayer:
    """In the place of a layer's forward: the first of a run computes it, the others have been."""

    def __init__(self, run: Run, place: int, plain: Callable[..., Tensor]) -> None:
        self._run = run
        self._is_first = place == 0
        self._plain = plain

    def __call__(
        self, hidden_states: Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any
    ) -> Tensor:
        run, step = self._run, attention.current_step()
        if step is not None:
            if self._is_first:
                run.answered = None
                x = hidden_states[0]
                if x.is_contiguous() and run.compute(x, position_embeddings, step):
                    run.answered = step, hidden_states
            if run.answered is not None and run.answered[0] is step:
                if run.answered[1] is not hidden_states:
                    raise RuntimeError("layers are called in another way than at load")
                return hidden_states
        return self._plain(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)


def find(model: nn.Module) -> list[PackedLayer]:
    """Layers that can be computed here, while their parts are still the model's own."""
    if not converts_halves():
        return []
    known: dict[object, bool] = {}
    found = []
    for layer in fusions.packed_layers(model, fusions.side_by_side):
        shape = Shape.of(layer)
        if shape is None:
            continue
        kind = _kind(layer, shape)
        if kind not in known:
            known[kind] = _answers_alike(layer, shape)
        if known[kind]:
            found.append(layer)
    return found


def install(model: nn.Module, layers: Sequence[PackedLayer]) -> None:
    """Have steps of single rows computed in as few calls as there are runs of like layers."""
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    by_shape: dict[Shape, Scratch] = {}
    for some in _runs(model, layers):
        shape = Shape.of(some[0])
        assert shape is not None
        if shape not in by_shape:
            by_shape[shape] = Scratch(shape, len(layers), threads)
        run = Run(some, shape, by_shape[shape])
        for place, layer in enumerate(some):
            fusions.install(layer, FusedLayer(run, place, layer.module.forward))
    if layers:
        log.info("%d layers are computed in one call for a step of single rows", len(layers))


def _calls(model: Any, layers: Sequence[PackedLayer]) -> list[_Call]:
    """How they are called in a forward of the model, in order."""
    calls: list[_Call] = []
    spy = _Spy()

    def noting(layer: PackedLayer) -> Callable[..., Tensor]:
        plain = layer.module.forward

        def forward(hidden_states: Tensor, **how: Any) -> Tensor:
            # What lies between two layers may have worked in place: only the same numbers count.
            begun = hidden_states.clone()
            answer: Tensor = plain(hidden_states, **how)
            angles, seen = how.get("position_embeddings"), spy.masking
            if seen is not None and seen.softcap is None and seen.sinks is None:
                # Some keep the window elsewhere, and only say it to attention.
                own = replace(layer, window=seen.window)
                calls.append((own, (hidden_states, begun), (answer, answer.clone()), angles))
            return answer

        return forward

    before = [layer.module.forward for layer in layers]
    ids = torch.zeros(1, 2, dtype=torch.long)
    try:
        for layer in layers:
            layer.module.forward = noting(layer)
        with torch.inference_mode(), attention.running(spy.step(_layer_count(model))):
            getattr(model, "base_model", model)(
                input_ids=ids, position_ids=torch.arange(2)[None], use_cache=False
            )
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        log.debug("layers are called in a way that is not known: %s", error)
        return []
    finally:
        for layer, forward in zip(layers, before, strict=True):
            layer.module.forward = forward
    return calls


def _runs(model: Any, layers: Sequence[PackedLayer]) -> Iterator[list[PackedLayer]]:
    """Layers that get nothing but the answer of the one before and the same angles as it had."""
    some: list[PackedLayer] = []
    last: tuple[Any, ...] = (None, None, None, None)
    for call in _calls(model, layers) if layers else ():
        layer, rows, _, angles = call
        if some and (
            not _same(rows, last[2])
            or angles is not last[3]
            or Shape.of(layer) != Shape.of(some[0])
        ):
            yield some
            some = []
        some.append(layer)
        last = call
    if some:
        yield some


def _layer_count(model: Any) -> int:
    count: int = model.config.get_text_config().num_hidden_layers
    return count


def _same(one: _Seen, other: _Seen) -> bool:
    return one[0] is other[0] and torch.equal(one[1], other[1])


def _kind(layer: PackedLayer, shape: Shape) -> object:
    """Equal for layers that compute the same, beside their weights' numbers."""
    parts = (layer.module, layer.module.self_attn, layer.module.mlp)
    kinds = tuple(entry and entry[1] for entry in map(entry_of, weights_of(layer)))
    own = layer.scaling, layer.epsilon, layer.window, layer.head_norms is None
    return shape, kinds, own, layer.qkv_bias is None, *map(_traits, parts)


def _traits(module: object) -> tuple[object, ...]:
    """Its type and plain attributes; any other attribute equals only itself."""
    everyones = vars(nn.Module()).keys() | {"layer_idx"}
    own = [(name, value) for name, value in vars(module).items() if name not in everyones]
    plain = (int, float, str, type(None))
    return (type(module), *((name, v if isinstance(v, plain) else id(v)) for name, v in own))


class _Spy:
    """Attention of rows among themselves, by the book; and how it was asked for."""

    def __init__(self) -> None:
        self.masking: Masking | None = None

    def attend(
        self, rows: Tensor, new: tuple[Tensor, Tensor], blocks: Any, batch: Any, masking: Masking
    ) -> Tensor:
        self.masking = masking
        return reference.attend(rows, *new, masking)

    def step(self, layers: int) -> PagedStep:
        """For a forward of a model of so many layers."""
        none = torch.empty(0)
        batch, memory = _SampleBatch((None,)), _SampleMemory(LayerBlocks(none, none))
        return PagedStep(batch, memory, self, (None,) * layers)  # type: ignore[arg-type] # all that is asked of it


@dataclass(frozen=True, slots=True)
class _SampleMemory:
    """Blocks for one layer and a few tokens of two sequences."""

    layer_blocks: LayerBlocks

    def blocks(self, layer: int) -> LayerBlocks:
        return self.layer_blocks

    def group_of(self, layer: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class _SampleBatch:
    groups: tuple[Any, ...]


@torch.inference_mode()
def _answers_alike(layer: PackedLayer, shape: Shape) -> bool:
    """Whether rows that come one by one get the answers of the layer's own forward for all."""
    count = _SAMPLE_TOKENS
    run = Run([layer], shape, Scratch(shape, 1, numba.get_num_threads()))
    x, call = fusions.sample_call(layer.module, torch.arange(count))
    spy = _Spy()
    place = 3, _SAMPLE_BLOCK, shape.kv_heads, shape.head_dim
    memory = _SampleMemory(LayerBlocks(torch.zeros(place), torch.zeros(place)))
    try:
        with attention.running(spy.step(layer.index + 1)):
            theirs = fusions.own_forward(layer)(x.clone(), **call)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        log.debug("layer %d is computed as before: %s", layer.index, error)
        return False
    seen = spy.masking
    if not isinstance(theirs, Tensor) or seen is None:
        return False
    if seen.softcap is not None or seen.sinks is not None:
        return False
    change = theirs[0] - x[0]
    return all(
        _alike(_one_by_one(run, x[0], call["position_embeddings"], memory, rows) - x[0], change)
        for rows in (1, 3)
    )


def _one_by_one(
    run: Run, x: Tensor, angles: tuple[Tensor, Tensor], memory: _SampleMemory, rows: int
) -> Tensor:
    """The same sequence so many times at once; the answers of the last."""
    tables = torch.arange(rows, dtype=torch.int32)[:, None]
    answers = []
    for token in range(len(x)):
        contexts = torch.full((rows,), token + 1, dtype=torch.int32)
        none = torch.empty(0, dtype=torch.long)
        batch = _SampleBatch((GroupBatch(none, none, rows, tables, contexts, ()),))
        windows = (None,) * (run.layers[0].index + 1)
        step = PagedStep(batch, memory, None, windows)  # type: ignore[arg-type] # not asked
        own = x[token].repeat(rows, 1)
        turns = tuple(part[:, token : token + 1].repeat(1, rows, 1) for part in angles)
        if not run.compute(own, turns, step):
            return torch.full_like(x, torch.nan)
        answers.append(own[-1])
    return torch.stack(answers)


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    return bool(((ours - theirs).norm(dim=-1) <= _TOLERANCE * theirs.norm(dim=-1)).all())
