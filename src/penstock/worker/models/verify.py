"""Is this model computed exactly? Asked once, at load, before anybody is answered.

Two questions. Does every layer reach our attention (a model can accept the name and never call
it)? And do packed, chunked rows over the arena give the logits that the model's own attention
gives for the same tokens (what an architecture says only in its mask would be lost silently)?
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from penstock.errors import ModelUnusable
from penstock.worker.core.plan import Plan, Slice
from penstock.worker.models import attention
from penstock.worker.models.kinds import implementation_for

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from penstock.catalog.kv_formats import KvFormat
    from penstock.worker.kv.arena import LayerGeometry
    from penstock.worker.kv.cache import KvCache

    class Scorer(Protocol):
        """Runs plans; here only for their logits."""

        def logits(self, plan: Plan) -> Tensor: ...


_PROBE_ID = -1
_SERVED_LAYERS = ("full_attention", "sliding_attention")
_CHECK_TOKENS = 40
# Largest relative error of a row's logits. Of all rows in float32; of the median row in narrow
# types and over KV that is rounded, where the routing of experts may flip here and there.
_MOST = 1e-1
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: _MOST}


@torch.inference_mode()
def probe(model: PreTrainedModel, text: PretrainedConfig) -> dict[int, LayerGeometry]:
    """The KV geometry of every layer, in layer order; ModelUnusable if one does not call us."""
    name = type(model).__name__
    kinds = set(getattr(text, "layer_types", None) or ())
    if unknown := kinds.difference(_SERVED_LAYERS):
        raise ModelUnusable(
            f"{name} has layers of kind {', '.join(sorted(unknown))}; "
            f"penstock serves {' and '.join(_SERVED_LAYERS)} layers."
        )
    recording = attention.Recording()
    ids = torch.arange(2, device=model.device)[None]
    try:
        with attention.running(recording):
            model(input_ids=ids, position_ids=ids, use_cache=False)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise ModelUnusable(f"{name} cannot be run with penstock's attention: {error}") from error
    missing = sorted(set(range(text.num_hidden_layers)).difference(recording.layers))
    if missing:
        raise ModelUnusable(
            f"{name}: {len(missing)} of {text.num_hidden_layers} layers compute attention in a "
            f"way that penstock cannot page (the first is layer {missing[0]})."
        )
    return dict(sorted(recording.layers.items()))


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
    ours = score(scorer, kv, ids, chunk=max(1, count // 3))
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


def score(scorer: Scorer, kv: KvCache, tokens: list[int], chunk: int) -> Tensor:
    """Logits of every position, [tokens, vocabulary], computed in chunks."""
    handle = kv.open(tokens)
    kv.admit(handle, kv.match(handle, 0), len(tokens), fetch=False)
    rows = []
    try:
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            end = start + len(part)
            kv.extend(handle, end)
            piece = Slice(_PROBE_ID, start, part, handle.arrays, len(part), end == len(tokens))
            # A lone row goes the way of a decode, so that both kernels are seen.
            plan = Plan(decodes=[piece]) if piece.count == 1 else Plan(chunks=[piece])
            rows.append(scorer.logits(plan))
    finally:
        kv.release(handle)
    return torch.cat(rows)


def _own_logits(model: PreTrainedModel, ids: list[int]) -> Tensor | None:
    inputs = torch.tensor([ids], device=model.device)
    try:
        model.set_attn_implementation("eager")
        answer: Any = model(input_ids=inputs, use_cache=False)
    finally:
        model.set_attn_implementation(implementation_for(model.config))
    logits: Tensor = answer.logits[0].float()
    return logits
