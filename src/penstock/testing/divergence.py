"""How far a model's predictions move when its KV is kept in another format.

transformers computes a text in one piece, the engine in chunks, so that all but the first read KV
that was kept. What is compared are the distributions of every next token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from penstock.testing.exactness import Mode, start_engine
from penstock.worker.models.verify import score

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor


WINDOW = 512  # tokens that are computed as one sequence
_CHUNK = 64


@dataclass(slots=True)
class Divergence:
    """Of an engine's predictions from those of plain transformers, whose KV is not rounded."""

    tokens: int = 0
    kl: float = 0.0  # sums over tokens
    same_top: int = 0
    loss: float = 0.0  # of the text, by transformers and by the engine
    other_loss: float = 0.0
    token_bytes: int = 0  # of that KV

    def add(self, plain: Tensor, other: Tensor, following: Tensor) -> None:
        """Logits of some rows, [T, vocabulary], and the token that follows each."""
        known, found = (torch.log_softmax(rows.double(), dim=-1) for rows in (plain, other))
        self.tokens += len(following)
        self.kl += float((known.exp() * (known - found)).sum())
        self.same_top += int((known.argmax(dim=-1) == found.argmax(dim=-1)).sum())
        rows = torch.arange(len(following))
        self.loss -= float(known[rows, following].sum())
        self.other_loss -= float(found[rows, following].sum())

    def figures(self) -> dict[str, float]:
        """As they are recorded."""
        plain, other = (math.exp(loss / self.tokens) for loss in (self.loss, self.other_loss))
        return {
            "tokens": self.tokens,
            "mean KL divergence": float(f"{self.kl / self.tokens:.3g}"),
            "same top token %": round(100 * self.same_top / self.tokens, 2),
            "perplexity change %": round(100 * (other / plain - 1), 3),
            "bytes a token": self.token_bytes,
        }


def tokens_of(folder: Path, pages: Iterable[Path], count: int) -> list[int]:
    """The first `count` tokens of some pages of text, in the model's own tokens."""
    encoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = []
    for page in pages:
        ids += encoder.encode(page.read_text("utf-8"), add_special_tokens=False).ids
        if len(ids) >= count:
            return ids[:count]
    raise ValueError(f"the pages have {len(ids)} tokens, not {count}")


@torch.inference_mode()
def divergence(model: Any, folder: Path, ids: list[int], kv_dtype: str = "int8") -> Divergence:
    """Of an engine over KV in a format from transformers' `model` of the same folder, over a text,
    window by window."""
    mode = Mode(kv_dtype, _CHUNK, 1, kv_dtype=kv_dtype, max_context=WINDOW + 1)
    engine = start_engine(folder, mode)
    scorer: Any = engine.executor  # it has the logits of a plan too
    found = Divergence(token_bytes=engine.kv.cost.token_bytes)
    for first in range(0, len(ids) - 1, WINDOW):
        text = ids[first : first + WINDOW + 1]
        plain = model(input_ids=torch.tensor([text[:-1]]), use_cache=False).logits[0]
        other = score(scorer, engine.kv, text[:-1], _CHUNK)
        following = torch.tensor(text[1:])
        for start in range(0, len(following), _CHUNK):  # numbers of a vocabulary are many
            part = slice(start, start + _CHUNK)
            found.add(plain[part], other[part], following[part])
    return found
