"""The starter model's greedy tokens equal transformers': a selection of what `make proof` runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.testing import prompts
from penstock.testing.exactness import Mode, Reference, compare_mode

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (150, 120, 33, 1, 260)
NEW_TOKENS = 24
# The first two requests outgrow it together.
CROWDED = Mode("crowded", step_tokens=128, pool_tokens=304)


@pytest.fixture(scope="module")
def reference(starter_folder: Path) -> Reference:
    return Reference.load(starter_folder)


@pytest.mark.parametrize(
    "mode", [Mode("arrivals", step_tokens=64, arrive_every=3), CROWDED], ids=str
)
def test_tokens_equal_transformers(reference: Reference, starter_folder: Path, mode: Mode) -> None:
    texts = prompts.build(starter_folder / "tokenizer.json", LENGTHS)
    tally = compare_mode(reference, starter_folder, mode, texts, NEW_TOKENS)
    assert tally.tokens == len(LENGTHS) * NEW_TOKENS
    assert (tally.preemptions > 0) == (mode is CROWDED)
