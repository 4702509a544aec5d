"""A model that sees, taken apart: its encoder as a stage, its language model for packed steps.

The model's own outer forward is run for an image alone, with the language model in it replaced by
one that keeps what it would have been called with: the rows of the image, whatever the architecture
does before. In steps the language model is called directly, with such rows in the place of the
placeholders' embeddings; the outer forward would compare and place them again at every step.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.errors import ModelUnusable
from penstock.worker.models import attention

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PreTrainedModel

    from penstock.catalog.vision import Vision
    from penstock.worker.models.batch import MediaRows


class _Kept(Exception):  # noqa: N818 - how the forward is left
    """What the language model would have been called with."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given


class _Answer:
    """What the top of a model asks its inner part for: hidden states, and nothing of the rest."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: int) -> Tensor | None:
        return self.last_hidden_state if place == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class TextPart(nn.Module):
    """Of a model that sees what generates text, as kernels adopt it: the encoder keeps its code."""

    def __init__(self, model: PreTrainedModel, language: nn.Module) -> None:
        super().__init__()
        self.config = model.config
        self.base_model = language
        self.lm_head = model.get_output_embeddings()


class VisionDoor:
    """The way into one model, whose inner forward it replaces."""

    def __init__(self, model: PreTrainedModel, vision: Vision | None) -> None:
        inner: Any = getattr(model, model.base_model_prefix, None)
        language = next(
            (
                part
                for name in ("language_model", "text_model")
                if isinstance(part := getattr(inner, name, None), nn.Module)
            ),
            None,
        )
        if language is None or not hasattr(model, "lm_head"):
            raise ModelUnusable(
                f"{type(model).__name__} has no language model beside its encoder that could be "
                "called by itself."
            )
        self.model: Any = model
        self.vision = vision
        self._inner, self._language = inner, language
        self._outer = inner.forward  # the architecture's own
        inner.forward = self._forward

    @contextmanager
    def text_part(self) -> Iterator[TextPart]:
        """For kernels to adopt; the head that they leave there is the model's."""
        part = TextPart(self.model, self._language)
        yield part
        self.model.lm_head = part.lm_head

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Within it the model's forward is its own."""
        self._inner.forward = self._outer
        try:
            yield
        finally:
            self._inner.forward = self._forward

    @property
    def hidden_size(self) -> int:
        """Numbers of a row."""
        size: int = self.model.config.get_text_config().hidden_size
        return size

    @property
    def row_bytes(self) -> int:
        """That the rows of one image token take."""
        assert self.vision is not None
        item_bytes: int = self.model.dtype.itemsize
        return self.vision.levels * self.hidden_size * item_bytes

    @torch.inference_mode()
    def encode(self, inputs: Mapping[str, Tensor], tokens: int) -> Tensor:
        """The rows of one image, [levels, tokens, hidden]; ValueError if it has another number."""
        assert self.vision is not None
        ids = torch.full((1, tokens), self.vision.token_id, device=self.model.device)
        nowhere = torch.zeros_like(ids)
        language = self._language
        before = language.__dict__.get("forward")
        language.forward = _keep
        try:
            self._outer(input_ids=ids, position_ids=nowhere, use_cache=False, **inputs)
        except _Kept as kept:
            given = kept.given
        else:
            raise ValueError("the model did not call its language model")
        finally:
            if before is None:
                del language.forward
            else:
                language.forward = before
        rows = [given["inputs_embeds"][0], *(given.get("deepstack_visual_embeds") or ())]
        return torch.stack([row.to(self.model.dtype) for row in rows])

    def _forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> _Answer:
        """The inner forward of steps."""
        rows = self._inner.get_input_embeddings()(input_ids)
        more: dict[str, Any] = {}
        step = attention.current_step()
        media: MediaRows | None = None if step is None else getattr(step.batch, "media", None)
        if media is not None:
            rows[0, media.places] = media.rows[0].to(rows.dtype)
            if len(media.rows) > 1:
                seen = torch.zeros(input_ids.shape, dtype=torch.bool, device=input_ids.device)
                seen[0, media.places] = True
                more = {"visual_pos_masks": seen, "deepstack_visual_embeds": list(media.rows[1:])}
        answer = self._language(
            inputs_embeds=rows, position_ids=position_ids, use_cache=False, **more
        )
        return _Answer(answer.last_hidden_state)


def _keep(*_: Any, **given: Any) -> None:
    raise _Kept(given)
