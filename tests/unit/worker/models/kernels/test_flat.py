"""Attention over texts side by side equals attention over each of them, spelled out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.worker.models.kernels import flat
from penstock.worker.models.kernels.flat import Spans, attend_flat
from penstock.worker.models.kernels.interface import Masking

LENGTHS = (1, 1, 3, 5, 5, 5, 20, 70)
HEADS, KV_HEADS, DIM = 4, 2, 8


def _naive(queries: Tensor, keys: Tensor, values: Tensor, masking: Masking, causal: bool) -> Tensor:
    """One text, every pair of rows by itself."""
    out = torch.empty(len(queries), HEADS, DIM)
    for row in range(len(queries)):
        columns = [
            column
            for column in range(len(queries))
            if (not causal or column <= row)
            and (masking.window is None or abs(column - row) < masking.window)
        ]
        for head in range(HEADS):
            its_keys = keys[columns, head * KV_HEADS // HEADS]
            scores = its_keys @ queries[row, head] * masking.scale
            if masking.softcap is not None:
                scores = masking.softcap * torch.tanh(scores / masking.softcap)
            if masking.sinks is not None:
                scores = torch.cat([scores, masking.sinks[head : head + 1]])
            weights = torch.softmax(scores, 0)[: len(columns)]
            out[row, head] = weights @ values[columns, head * KV_HEADS // HEADS]
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [1 << 22, 200])
@pytest.mark.parametrize(
    "masking",
    [
        Masking(0.4),
        Masking(0.4, window=4),
        Masking(0.4, softcap=2.0),
        Masking(0.4, window=6, softcap=2.0, sinks=torch.tensor([0.1, 0.5, -1.0, 2.0])),
    ],
)
def test_each_text_sees_itself_alone(
    masking: Masking, tile: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat, "TILE_SCORES", tile)
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    queries = torch.randn(total, HEADS, DIM, generator=generator)
    keys, values = (torch.randn(total, KV_HEADS, DIM, generator=generator) for _ in range(2))
    spans = Spans(LENGTHS)
    found = attend_flat(queries, keys, values, spans, masking, causal)
    for own in spans:
        expected = _naive(queries[own], keys[own], values[own], masking, causal)
        assert torch.allclose(found[own], expected, atol=1e-5)


def test_texts_of_one_length_are_computed_together() -> None:
    assert list(Spans(LENGTHS).groups()) == [
        (0, 2, 1),
        (2, 1, 3),
        (5, 3, 5),
        (20, 1, 20),
        (40, 1, 70),
    ]
