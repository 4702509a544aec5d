"""What KV in 8 bits does to the starter model's predictions, over 4,096 tokens of our own pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.testing.divergence import divergence, tokens_of
from penstock.testing.exactness import Reference

pytestmark = pytest.mark.proof

TOKENS = 4_096
DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("architecture", "memory", "memory-internals", "cache", "operations", "clients", "models")
MOST_KL = 2e-3


def test_predictions_hardly_move(starter_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = tokens_of(starter_folder, [DOCS / f"{name}.md" for name in PAGES], TOKENS + 1)
    found = divergence(Reference.load(starter_folder).model, starter_folder, ids)
    with capsys.disabled():
        print(f"\n{json.dumps(found.figures())}")  # noqa: T201 - what docs/proof.md records
    assert found.tokens == TOKENS
    assert found.kl / found.tokens <= MOST_KL
    assert found.same_top >= 0.95 * TOKENS
