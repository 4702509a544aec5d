"""Is this encoder computed exactly? Asked once, at load, before anybody is answered.

Texts of several lengths, packed, must give what the model gives for each of them alone with its own
attention. A model that never calls our attention is computed by its own code, in texts of equal
length; one that calls it and differs is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import ModelUnusable
from penstock.wire import Encoding
from penstock.worker.encoding.packing import Text
from penstock.worker.models import attention
from penstock.worker.models.kernels.flat import Spans

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from penstock.worker.encoding.runner import EncodeRunner

_LENGTHS = (1, 2, 7, 7, 33, 200)  # the longest spans the windows of common models
# Largest error, of the largest value of the text's rows.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@torch.inference_mode()
def choose_way(runner: EncodeRunner, model: PreTrainedModel, window: int) -> None:
    """Have the runner pack, or compute by lengths where the model has attention of its own;
    ModelUnusable if neither gives the model's own results."""
    name = type(model).__name__
    texts = _texts(runner.base, window)
    layers = runner.base.config.get_text_config().num_hidden_layers
    try:
        _, calls = runner.packed(texts, Spans(tuple(map(len, texts))))
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise ModelUnusable(f"{name} cannot be run with penstock's attention: {error}") from error
    runner.packs = calls > 0
    if 0 < calls < layers:
        raise ModelUnusable(
            f"{name}: {layers - calls} of {layers} layers compute attention in a way that texts "
            "side by side do not allow."
        )
    ours = runner.rows(texts)
    if calls:
        runner.base.set_attn_implementation("eager")
    try:
        theirs = [_alone(runner.base, text) for text in texts]
        scores = [_score_alone(model, text) for text in texts if model is not runner.base]
    finally:
        if calls:
            runner.base.set_attn_implementation(attention.IMPLEMENTATION)
    worst = max(_error(own, other) for own, other in zip(ours, theirs, strict=True))
    _refuse(model, worst, "side by side their rows")
    if scores:
        heads = [
            runner.head(own, text.tokens, text.encoding)
            for own, text in zip(ours, texts, strict=True)
        ]
        # Of all of them: one alone may come to lie near zero.
        worst = _error(torch.cat(heads), torch.cat(scores), least_range=1e-2)
        _refuse(model, worst, "scores from rows computed side by side")


def _refuse(model: PreTrainedModel, error: float, what: str) -> None:
    if not error <= _TOLERANCE.get(model.dtype, 1e-1):
        raise ModelUnusable(
            f"{type(model).__name__} computes texts in a way penstock does not know: {what} differ "
            f"from the model's own by {error:.1e} of their range."
        )


def _error(ours: Tensor, theirs: Tensor, least_range: float = 1e-6) -> float:
    range_ = theirs.float().abs().amax().clamp_min(least_range)
    return float((ours.float() - theirs.float()).abs().amax() / range_)


def _alone(model: PreTrainedModel, text: Text) -> Tensor:
    """As the model computes it, positions included."""
    answer: Any = model(input_ids=torch.tensor([text.tokens], device=model.device))
    rows: Tensor = answer.last_hidden_state[0]
    return rows


def _score_alone(model: PreTrainedModel, text: Text) -> Tensor:
    answer: Any = model(input_ids=torch.tensor([text.tokens], device=model.device))
    logits: Tensor = answer.logits
    if logits.numel() != 1:
        shape = list(logits.shape)
        raise ModelUnusable(
            f"{type(model).__name__} answers a text with values of the shape {shape}, not with one "
            "score."
        )
    return logits.flatten()


def _texts(model: PreTrainedModel, window: int) -> list[Text]:
    generator = torch.Generator().manual_seed(0)
    config = model.config.get_text_config()
    texts = []
    for number, length in enumerate(min(length, window) for length in _LENGTHS):
        ids = torch.randint(0, config.vocab_size - 1, (length,), generator=generator)
        # Some models count positions from the tokens that are no padding.
        padding = config.pad_token_id
        ids += (ids >= padding) if padding is not None else 0
        texts.append(
            Text(
                number,
                ids.clamp_max(config.vocab_size - 1).tolist(),
                Encoding(raw=True),
                (0, number),
            )
        )
    return texts
