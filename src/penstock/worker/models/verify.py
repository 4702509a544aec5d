"""Is this model computed exactly? Asked once, at load, before anybody is answered.

Two questions. Does every layer reach our attention (a model can accept the name and never call
it)? And do packed, chunked rows over the arena give the logits that the model's own attention
gives for the same tokens (what an architecture says only in its mask would be lost silently)?
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from penstock.errors import ModelUnusable
from penstock.worker.core.plan import Plan, Slice
from penstock.worker.models import attention
from penstock.worker.models.kinds import implementation_for, sees
from penstock.worker.models.recurrent import hook
from penstock.worker.models.recurrent.hook import StateRecording

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from penstock.catalog.kv_formats import KvFormat
    from penstock.worker.kv.arena import LayerGeometry
    from penstock.worker.kv.cache import KvCache
    from penstock.worker.kv.layout.layer_states import StateGeometry
    from penstock.worker.kv.tables import KvHandle

    class Scorer(Protocol):
        """Runs plans; here only for their logits."""

        def logits(self, plan: Plan) -> Tensor: ...


_PROBE_ID = -1
_SERVED_LAYERS = ("full_attention", "sliding_attention")
_STATE_LAYERS = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid")
_KEEP_NOTHING = ("mlp", "moe")
_CHECK_TOKENS = 40
# Largest relative error of a row's logits. Of all rows in float32; of the median row in narrow
# types and over KV that is rounded, where the routing of experts may flip here and there.
_MOST = 1e-1
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: _MOST}


@dataclass(frozen=True, slots=True)
class Kept:
    """What a model's layers keep, by their numbers."""

    attention: dict[int, LayerGeometry]  # of every token
    states: dict[int, StateGeometry]  # of a sequence, whatever its length
    # Generated tokens leave other states than the same tokens of a prompt.
    prompts_differ: bool = False


@torch.inference_mode()
def probe(model: PreTrainedModel, text: PretrainedConfig) -> Kept:
    """What every layer keeps, in layer order; ModelUnusable if one does not call us."""
    name = type(model).__name__
    kinds = tuple(getattr(text, "layer_types", None) or ())
    if unknown := set(kinds).difference(_SERVED_LAYERS, _STATE_LAYERS, _KEEP_NOTHING):
        raise ModelUnusable(
            f"{name} has layers of kind {', '.join(sorted(unknown))}; "
            f"penstock serves {', '.join(_SERVED_LAYERS + _STATE_LAYERS)} layers."
        )
    recording, states = attention.Recording(), StateRecording()
    ids = torch.arange(2, device=model.device)[None]
    recurs = hook.install(model)
    if recurs and sees(model.config):
        raise ModelUnusable(
            f"{name} has an encoder of images and recurrent layers; penstock serves models with "
            "one of both so far."
        )
    try:
        with attention.running(recording), hook.states_of(states) as cache:
            named = {hook.cache_name(model): cache} if recurs else {}
            model(input_ids=ids, position_ids=ids, use_cache=False, **named)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise ModelUnusable(f"{name} cannot be run with penstock's attention: {error}") from error
    _refuse_missing(name, kinds, text.num_hidden_layers, recording, states)
    return Kept(
        dict(sorted(recording.layers.items())), dict(sorted(states.layers.items())), states.limits
    )


def _refuse_missing(
    name: str,
    kinds: tuple[str, ...],
    count: int,
    recording: attention.Recording,
    states: StateRecording,
) -> None:
    """Every layer keeps what is known, or is of a kind that keeps nothing."""
    if states.unknown:
        raise ModelUnusable(
            f"{name}: {len(states.unknown)} of {count} layers keep a recurrent state in a way that "
            f"penstock does not know (the first is layer {min(states.unknown)})."
        )
    if strange := set(recording.layers).difference(range(count)):
        raise ModelUnusable(
            f"{name}: {len(strange)} of its attention modules do not say which layer they are, as "
            "where layers share one; penstock cannot page their KV."
        )
    nothing = {index for index, kind in enumerate(kinds) if kind in _KEEP_NOTHING}
    missing = sorted(set(range(count)) - nothing - set(recording.layers) - set(states.layers))
    if not missing:
        return
    kind = kinds[missing[0]] if missing[0] < len(kinds) else ""
    if kind in _STATE_LAYERS:
        raise ModelUnusable(
            f"{name}: {len(missing)} of {count} layers have a recurrent state that penstock cannot "
            f"continue (the first is layer {missing[0]}, of kind {kind})."
        )
    raise ModelUnusable(
        f"{name}: {len(missing)} of {count} layers compute attention in a "
        f"way that penstock cannot page (the first is layer {missing[0]})."
    )


@torch.inference_mode()
def compare_with_own_attention(
    model: PreTrainedModel,
    scorer: Scorer,
    kv: KvCache,
    text: PretrainedConfig,
    context: int,
    form: KvFormat,
) -> None:
    """Refuse the model when rows over the arena do not give its own logits."""
    count = min(_CHECK_TOKENS, context - 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, text.vocab_size, (count,), generator=generator).tolist()
    # Whose state is lost, or taken for another's, shows beside a second sequence.
    beside = ids[::-1] if kv.states.slot_bytes else None
    ours = score(scorer, kv, ids, max(1, count // 3), beside)
    theirs = _own_logits(model, ids)
    if theirs is None:
        return
    error = (ours - theirs).abs().amax(dim=-1) / theirs.abs().amax(dim=-1).clamp_min(1e-6)
    exact = model.dtype == torch.float32 and not form.scaled
    worst = float(error.max() if exact else error.median())
    tolerance = _TOLERANCE.get(model.dtype, _MOST)
    if not worst <= (_MOST if form.scaled else tolerance):
        raise ModelUnusable(
            f"{type(model).__name__} computes attention in a way penstock does not know: its "
            f"logits differ from the model's own by {worst:.1e} of their range."
        )


def score(
    scorer: Scorer, kv: KvCache, tokens: list[int], chunk: int, beside: list[int] | None = None
) -> Tensor:
    """Logits of every position, [tokens, vocabulary], computed in chunks; with the same number of
    tokens of another sequence in every step, if there are any and there is room for both."""
    sequences = [tokens]
    if beside is not None and 2 * kv.need_bytes(len(tokens)) <= kv.capacity_bytes - kv.held_bytes:
        sequences.append(beside)
    handles: list[KvHandle] = []
    rows = []
    try:
        for ids in sequences:
            handle = kv.open(ids)
            kv.admit(handle, kv.match(handle, 0), len(ids), fetch=False)
            handles.append(handle)
        for start in range(0, len(tokens), chunk):
            parts = zip(handles, sequences, strict=True)
            plan = _scored(
                kv, [(handle, ids[start : start + chunk]) for handle, ids in parts], start
            )
            rows.append(scorer.logits(plan)[: len(tokens[start : start + chunk])])
    finally:
        for handle in handles:
            kv.release(handle)
    return torch.cat(rows)


def _scored(kv: KvCache, parts: list[tuple[KvHandle, list[int]]], start: int) -> Plan:
    """A step over the next tokens of each. A lone row goes the way of a decode, so that both
    kernels are seen."""
    pieces = []
    for number, (handle, part) in enumerate(parts):
        kv.extend(handle, start + len(part))
        place, count = handle.state.place, len(part)
        piece = Slice(
            _PROBE_ID - number, start, part, handle.arrays, count, samples=False, state=place
        )
        pieces.append(piece)
    single = len(parts[0][1]) == 1
    return Plan(decodes=pieces) if single else Plan(chunks=pieces)


def _own_logits(model: PreTrainedModel, ids: list[int]) -> Tensor | None:
    inputs = torch.tensor([ids], device=model.device)
    try:
        model.set_attn_implementation("eager")
        answer: Any = model(input_ids=inputs, use_cache=False)
    finally:
        model.set_attn_implementation(implementation_for(model.config))
    logits: Tensor = answer.logits[0].float()
    return logits
