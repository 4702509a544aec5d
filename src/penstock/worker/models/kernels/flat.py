"""Attention over whole texts that lie side by side in one row of tokens, in plain torch.

    rows   [ a | b | c c c | d d d | e e e e e ]     shortest first: equal lengths are neighbours

Each text sees itself alone, in both directions or backwards only. Texts of one length are computed
together, without padding and without a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.worker.models.kernels.interface import Masking

if TYPE_CHECKING:
    from collections.abc import Iterator

TILE_SCORES = 1 << 22  # of all heads together, where scores have to be spelled out or masked


@dataclass(frozen=True, slots=True)
class Spans:
    """The lengths of the texts, in the order of their rows."""

    lengths: tuple[int, ...]

    def groups(self) -> Iterator[tuple[int, int, int]]:
        """Neighbours of one length: the first row, how many texts, their length."""
        start = 0
        for length, members in groupby(self.lengths):
            count = len(list(members))
            yield start, count, length
            start += count * length

    def __iter__(self) -> Iterator[slice]:
        start = 0
        for length in self.lengths:
            yield slice(start, start + length)
            start += length


# Queries, keys and values [T, heads, dim], the texts, the scores' form, and whether a row sees only
# what is before it.
FlatAttention = Callable[[Tensor, Tensor, Tensor, Spans, Masking, bool], Tensor]


def attend_flat(
    rows: Tensor, keys: Tensor, values: Tensor, spans: Spans, masking: Masking, causal: bool
) -> Tensor:
    """What each row sees in its own text, [T, heads, value_dim]."""
    out = rows.new_empty(*rows.shape[:2], values.shape[2])
    for start, count, length in spans.groups():
        own = slice(start, start + count * length)
        queries, its_keys, its_values = (
            part[own].view(count, length, *part.shape[1:]).transpose(1, 2)
            for part in (rows, keys, values)
        )  # [texts, heads, length, dim]
        seen = _attend(queries, its_keys, its_values, masking, causal)
        out[own] = seen.transpose(1, 2).flatten(0, 1)
    return out


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, masking: Masking, causal: bool
) -> Tensor:
    length = queries.shape[2]
    shared = queries.shape[1] // keys.shape[1]  # heads that have one head of keys in common
    keys, values = (_spread(part, shared) for part in (keys, values))
    plain = masking.softcap is None and masking.sinks is None
    window = None if masking.window is None or masking.window >= length else masking.window
    if plain and window is None:
        return F.scaled_dot_product_attention(
            queries, keys, values, is_causal=causal and length > 1, scale=masking.scale
        )
    pieces = []
    for first, last in _tiles(queries, window):
        begin, end = _columns(first, last, length, window, causal)
        part, its_keys, its_values = (
            queries[:, :, first:last], keys[:, :, begin:end], values[:, :, begin:end]
        )  # fmt: skip
        seen = _visible((first, last), (begin, end), window, causal, queries.device)
        if plain:
            piece = F.scaled_dot_product_attention(
                part, its_keys, its_values, attn_mask=seen, scale=masking.scale
            )
        else:
            piece = _spelled_out(part, its_keys, its_values, seen, masking)
        pieces.append(piece)
    return torch.cat(pieces, dim=2)


def _spread(part: Tensor, shared: int) -> Tensor:
    if shared == 1:
        return part
    return part[:, :, None].expand(-1, -1, shared, -1, -1).flatten(1, 2)


def _tiles(queries: Tensor, window: int | None) -> Iterator[tuple[int, int]]:
    texts, heads, length, _ = queries.shape
    seen = length if window is None else min(length, 3 * window)
    size = max(1, TILE_SCORES // (texts * heads * seen))
    if window is not None:
        size = min(size, window)
    return ((first, min(first + size, length)) for first in range(0, length, size))


def _columns(
    first: int, last: int, length: int, window: int | None, causal: bool
) -> tuple[int, int]:
    """The columns that rows from `first` to `last` see any of."""
    begin = 0 if window is None else max(0, first - window + 1)
    end = last if causal else length if window is None else min(length, last + window - 1)
    return begin, end


def _visible(
    rows: tuple[int, int],
    columns: tuple[int, int],
    window: int | None,
    causal: bool,
    device: torch.device,
) -> Tensor | None:
    """[rows, columns]; None: all of them. A window is as wide to both sides."""
    if window is None and not causal:
        return None
    ahead = torch.arange(*columns, device=device) - torch.arange(*rows, device=device)[:, None]
    seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    return seen if window is None else seen & (ahead.abs() < window)


def _spelled_out(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, masking: Masking
) -> Tensor:
    scores = torch.matmul(queries, keys.transpose(2, 3)).mul_(masking.scale)
    if masking.softcap is not None:
        scores.div_(masking.softcap).tanh_().mul_(masking.softcap)
    if seen is not None:
        scores.masked_fill_(~seen, float("-inf"))
    scores = scores.float()
    if masking.sinks is not None:
        sinks = masking.sinks.float().view(1, -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(len(scores), -1, scores.shape[2], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
    return torch.matmul(weights.to(values.dtype), values)
