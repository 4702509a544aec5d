"""Attention in plain torch over gathered blocks: right on every device, quick on none.

The other kernels are tested against it, and it serves what they do not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.worker.models.recurrent.kernels import ReferenceStates

if TYPE_CHECKING:
    from torch.nn import Module

    from penstock.worker.kv.layout.layer_blocks import LayerBlocks
    from penstock.worker.models.batch import GroupBatch, Span
    from penstock.worker.models.kernels.interface import Masking
    from penstock.worker.models.recurrent.kernels import StateKernels

# Queries are taken in tiles, so that no score matrix grows with the square of the context: the most
# scores of all heads together.
TILE_SCORES = 1 << 20


class ReferenceKernels:
    """One sequence after the other, each over exactly its own tokens."""

    tile_scores = TILE_SCORES
    states: StateKernels = ReferenceStates()

    def adopt(self, model: Module) -> None:
        """The model's own parts are good enough here."""

    def attend(
        self,
        rows: Tensor,
        new: tuple[Tensor, Tensor],
        blocks: LayerBlocks,
        batch: GroupBatch,
        masking: Masking,
    ) -> Tensor:
        """All rows of a batch: decodes together, then chunk by chunk."""
        # First: a row sees itself and its chunk as any later row does, as they are kept.
        self.store(new, blocks, batch)
        out = self.answers(rows, blocks.dims[1])
        if batch.decodes:
            self.decode(rows[: batch.decodes], blocks, batch, masking, out)
        for span in batch.chunks:
            self.chunk(rows, blocks, span, masking, out)
        return out

    def answers(self, rows: Tensor, width: int) -> Tensor:
        """Where they go: as many vectors of this width as there are in `rows` [T, heads, d]."""
        return rows.new_empty(*rows.shape[:2], width)

    def store(self, new: tuple[Tensor, Tensor], blocks: LayerBlocks, batch: GroupBatch) -> None:
        blocks.store(batch.write_blocks, batch.write_slots, *new)

    def decode(
        self, rows: Tensor, blocks: LayerBlocks, batch: GroupBatch, masking: Masking, out: Tensor
    ) -> None:
        size = blocks.block_tokens
        for index, context in enumerate(batch.decode_contexts.tolist()):
            table = batch.decode_tables[index, : -(-context // size)].long()
            first = first_seen(context - 1, masking)
            seen = self.gathered(blocks, table, first, context, rows.dtype)
            out[index] = attend(rows[index : index + 1], *seen, masking, self.tile_scores)[0]

    def chunk(
        self, rows: Tensor, blocks: LayerBlocks, span: Span, masking: Masking, out: Tensor
    ) -> None:
        end = span.row + span.count
        first = first_seen(span.context - span.count, masking)
        seen = self.gathered(blocks, span.table, first, span.context, rows.dtype)
        out[span.row : end] = attend(rows[span.row : end], *seen, masking, self.tile_scores)

    def gathered(
        self, blocks: LayerBlocks, table: Tensor, first: int, end: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of positions `first .. end` side by side: [end - first, kv_heads, dim].

        They may be gone when others are gathered.
        """
        size = blocks.block_tokens
        skipped = first // size
        wanted = table[skipped : -(-end // size)]
        own = slice(first - skipped * size, end - skipped * size)
        keys, values = self.copied(blocks, wanted, dtype)
        return keys.flatten(0, 1)[own], values.flatten(0, 1)[own]

    def copied(
        self, blocks: LayerBlocks, wanted: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Some blocks of keys and of values, as numbers."""
        return blocks.load(wanted, dtype)


def attend(
    rows: Tensor, keys: Tensor, values: Tensor, masking: Masking, tile_scores: int = TILE_SCORES
) -> Tensor:
    """`rows` are the last of `keys`' positions; [T, heads, d] over [context, kv_heads, d]."""
    count, context = rows.shape[0], keys.shape[0]
    groups = rows.shape[1] // keys.shape[1]
    plain = masking.softcap is None and masking.sinks is None
    # [kv_heads, groups, T, d]: queries that share a KV head lie together, so KV is not repeated.
    queries = rows.view(count, keys.shape[1], groups, -1).permute(1, 2, 0, 3)
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    if plain and count == context and not (masking.window and masking.window < context):
        spread_keys, spread_values = (
            part[:, None].expand(-1, groups, -1, -1) for part in (keys, values)
        )
        answer = F.scaled_dot_product_attention(
            queries, spread_keys, spread_values, is_causal=count > 1, scale=masking.scale
        )
        return answer.permute(2, 0, 1, 3).flatten(1, 2)
    tile = max(1, tile_scores // (context * rows.shape[1]))
    pieces = []
    for start in range(0, count, tile):
        part = queries[:, :, start : start + tile]
        seen = _visible(context - count + start, part.shape[2], context, masking, rows.device)
        if plain:
            pieces.append(_fused(part, keys, values, seen, masking))
        else:
            pieces.append(_spelled_out(part, keys, values, seen, masking))
    return torch.cat(pieces, dim=2).permute(2, 0, 1, 3).flatten(1, 2)


def first_seen(position: int, masking: Masking) -> int:
    """The first position that a row at `position`, or any after it, sees."""
    return 0 if masking.window is None else max(0, position - masking.window + 1)


def _visible(
    first: int, count: int, context: int, masking: Masking, device: torch.device
) -> Tensor | None:
    """[count, context]: which positions each row sees; None: all of them."""
    window = masking.window
    if count == 1 and (window is None or window >= context):
        return None
    row = torch.arange(first, first + count, device=device)[:, None]
    column = torch.arange(context, device=device)[None]
    seen = column <= row
    return seen & (column > row - window) if window is not None else seen


def _fused(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, masking: Masking
) -> Tensor:
    groups, count = queries.shape[1], queries.shape[2]
    mask = None if seen is None else seen.repeat(groups, 1)
    answer = F.scaled_dot_product_attention(
        queries.flatten(1, 2)[None], keys[None], values[None], attn_mask=mask, scale=masking.scale
    )
    return answer[0].view(keys.shape[0], groups, count, -1)


def _spelled_out(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, masking: Masking
) -> Tensor:
    # In place: on a CPU each copy would be a piece of the heap as large as all of the scores.
    scores = torch.matmul(queries, keys[:, None].transpose(2, 3)).mul_(masking.scale)
    if masking.softcap is not None:
        scores.div_(masking.softcap).tanh_().mul_(masking.softcap)
    if seen is not None:
        scores.masked_fill_(~seen, float("-inf"))
    scores = scores.float()
    if masking.sinks is not None:
        sinks = masking.sinks.float().view(scores.shape[0], scores.shape[1], 1, 1)
        scores = torch.cat([scores, sinks.expand(-1, -1, scores.shape[2], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]]
    return torch.matmul(weights.to(values.dtype), values[:, None])
