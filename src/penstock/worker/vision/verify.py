"""Are images computed exactly? Asked once, at load.

A prompt with an image, whole by the model's own code and in chunks by ours, must give the same
logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import PenstockError
from penstock.images import BadImage
from penstock.wire import Media, Sampling, Submit, token_ids
from penstock.worker.models.kinds import implementation_for
from penstock.worker.models.verify import score
from penstock.worker.vision.prepare import placeholder_image

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.catalog.kv_formats import KvFormat
    from penstock.worker.backends.executor import Executor
    from penstock.worker.kv.cache import KvCache
    from penstock.worker.vision.encoder import ImageEncoder

_PROBE_ID = -1  # as `score` has it
_SIZE = 64, 16  # few tiles, of models that make small images larger
_TEXT_TOKENS = 12  # on both sides
_MOST_TOKENS = 4096
# Largest relative error of a row's logits; of the median row in narrow types.
_MOST = 1e-1
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: _MOST}


@torch.inference_mode()
def why_not_exact(
    encoder: ImageEncoder, executor: Executor, kv: KvCache, context: int, form: KvFormat
) -> str:
    """What is wrong, in words; "" if images are right."""
    data = placeholder_image(*_SIZE)
    try:
        layout, inputs = encoder.preparer.inputs(data, encoder.max_pixels)
        tokens = layout.tokens + 2 * _TEXT_TOKENS
        if tokens > min(_MOST_TOKENS, context - 1, kv.max_tokens() - 1):
            return f"an image of {_SIZE[0]} x {_SIZE[1]} pixels comes to {layout.tokens} tokens"
        theirs = _own_logits(encoder, inputs, layout.tokens)
        ours = _our_logits(encoder, executor, kv, data)
    except (BadImage, PenstockError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        return f"an image could not be computed ({error})"
    apart = (ours - theirs).abs().amax(dim=-1) / theirs.abs().amax(dim=-1).clamp_min(1e-6)
    dtype = executor.model.dtype
    exact = dtype == torch.float32 and not form.scaled
    worst = float(apart.max() if exact else apart.median())
    if not worst <= (_MOST if form.scaled else _TOLERANCE.get(dtype, _MOST)):
        return f"logits behind an image differ from the model's own by {worst:.1e} of their range"
    return ""


def _prompt(encoder: ImageEncoder, tokens: int) -> list[int]:
    vocabulary = encoder.door.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, vocabulary, (2 * _TEXT_TOKENS,), generator=generator).tolist()
    image = encoder.token_id
    text = [token if token != image else 0 for token in text]
    return [*text[:_TEXT_TOKENS], *[image] * tokens, *text[_TEXT_TOKENS:]]


def _own_logits(encoder: ImageEncoder, inputs: dict[str, Tensor], tokens: int) -> Tensor:
    model: Any = encoder.door.model
    ids = torch.tensor([_prompt(encoder, tokens)], device=model.device)
    if encoder.three_rows:
        inputs = {**inputs, "mm_token_type_ids": (ids == encoder.token_id).int()}
    with encoder.door.as_it_was():
        try:
            model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
            answer = model(input_ids=ids, use_cache=False, **inputs)
        finally:
            model.set_attn_implementation(implementation_for(model.config))
    logits: Tensor = answer.logits[0].float()
    return logits


def _our_logits(encoder: ImageEncoder, executor: Executor, kv: KvCache, data: bytes) -> Tensor:
    layout, _ = encoder.preparer.inputs(data, encoder.max_pixels)
    ids = _prompt(encoder, layout.tokens)
    media = Media(b"a prompt's image", data, [_TEXT_TOKENS, layout.tokens], layout.grid, "image")
    request = Submit(_PROBE_ID, token_ids(ids), 1, Sampling(temperature=0), media=[media])
    executor.admit(request)
    try:
        executor.encode_next()
        if (failure := executor.failure(_PROBE_ID)) is not None:
            raise ValueError(failure.message)
        return score(executor, kv, ids, chunk=max(1, len(ids) // 3))
    finally:
        executor.forget(_PROBE_ID)
