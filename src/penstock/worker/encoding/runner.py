"""One forward of transformers' model over whole texts, with penstock's attention inside.

packed     all texts in one row of tokens, each with positions of its own
by length  texts of equal length together, in the model's own code: for models whose attention
           is not ours to replace; equal lengths need no padding and no mask
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from penstock.worker.models.attention import FlatStep, running
from penstock.worker.models.kernels.flat import Spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from penstock.worker.encoding.heads import Head
    from penstock.worker.encoding.packing import Text
    from penstock.worker.models.kernels.flat import FlatAttention


@dataclass(frozen=True, slots=True)
class _Takes:
    """Which arguments a model's forward knows."""

    positions: bool
    segments: bool
    cache: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Takes:
        known = inspect.signature(model.forward).parameters
        several = (getattr(model.config, "type_vocab_size", None) or 1) > 1
        return cls(
            "position_ids" in known, several and "token_type_ids" in known, "use_cache" in known
        )


class EncodeRunner:
    """Owns the model and what comes behind it."""

    def __init__(
        self,
        base: PreTrainedModel,  # the transformer, without what comes behind it
        head: Head,
        attend: FlatAttention,
        first_position: int,
    ) -> None:
        self.base = base
        self.head = head
        self.packs = True
        self._attend = attend
        self._first_position = first_position
        self._takes = _Takes.of(base)
        self._causal = _stated_causality(base.config)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        device: torch.device = self.base.device
        return device

    @torch.inference_mode()
    def encode(self, texts: Sequence[Text]) -> list[Tensor]:
        """The vector or the score of each text, float32; equal lengths are neighbours."""
        rows = self.rows(texts)
        return [
            self.head(own, text.tokens, text.encoding)
            for text, own in zip(texts, rows, strict=True)
        ]

    @torch.inference_mode()
    def rows(self, texts: Sequence[Text]) -> list[Tensor]:
        """The last layer's rows of each text, [length, hidden]."""
        spans = Spans(tuple(map(len, texts)))
        if self.packs:
            rows = self.packed(texts, spans)[0]
            return [rows[own] for own in spans]
        found: list[Tensor] = []
        first = 0
        for _, count, length in spans.groups():
            some = texts[first : first + count]
            found += self._forward(some, (count, length))
            first += count
        return found

    def packed(self, texts: Sequence[Text], spans: Spans) -> tuple[Tensor, int]:
        """All rows, one text behind the other, and how many layers came to our attention."""
        step = FlatStep(spans, self._attend, self._causal)
        with running(step):
            rows = self._forward(texts, (1, sum(spans.lengths)))
        return rows[0], step.calls

    def _forward(self, texts: Sequence[Text], shape: tuple[int, int]) -> Tensor:
        """[*shape, hidden]"""
        ids = [token for text in texts for token in text.tokens]
        arguments: dict[str, Any] = {}
        if self._takes.positions:
            first = self._first_position
            at = [place for text in texts for place in range(first, first + len(text))]
            arguments["position_ids"] = self._tensor(at, shape)
        if self._takes.segments:
            arguments["token_type_ids"] = self._tensor(_segments(texts), shape)
        if self._takes.cache:
            arguments["use_cache"] = False
        answer: Any = self.base(input_ids=self._tensor(ids, shape), **arguments)
        rows: Tensor = answer.last_hidden_state
        return rows

    def _tensor(self, values: list[int], shape: tuple[int, int]) -> Tensor:
        return torch.tensor(values, device=self.device).view(shape)


def _segments(texts: Sequence[Text]) -> list[int]:
    """0 for the first text of a pair, 1 for the second."""
    found: list[int] = []
    for text in texts:
        second = text.encoding.second
        count = len(text) if second is None else min(second, len(text))
        found += [0] * count + [1] * (len(text) - count)
    return found


def _stated_causality(config: Any) -> bool | None:
    """What a configuration says against what the class of its layers does."""
    if getattr(config, "use_bidirectional_attention", None) is True:
        return False
    return False if getattr(config, "is_causal", None) is False else None
