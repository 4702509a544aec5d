"""The starter model, 20 prompts of 1 to 1,500 tokens, 128 new tokens each, in every mode."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from penstock.testing import prompts
from penstock.testing.exactness import MODES, Mode, Reference, compare_mode

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.proof

NEW_TOKENS = 128
# The longest request takes 1,628; a few of the others beside it outgrow the rest.
CROWDED = Mode("crowded", step_tokens=256, pool_tokens=1_728)


@pytest.fixture(scope="module")
def reference(starter_folder: Path) -> Reference:
    return Reference.load(starter_folder)


@pytest.mark.parametrize("mode", [*MODES, CROWDED], ids=str)
def test_tokens_equal_transformers(
    reference: Reference, starter_folder: Path, mode: Mode, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = prompts.build(starter_folder / "tokenizer.json")
    for text in texts:
        reference.greedy(text, NEW_TOKENS)  # so that the time below is the engine's own
    started = time.perf_counter()
    tally = compare_mode(reference, starter_folder, mode, texts, NEW_TOKENS)
    with capsys.disabled():
        print(  # noqa: T201 - what docs/proof.md records
            f"\n{mode}: {tally.tokens} tokens, {tally.ties} ties, 0 mismatches, "
            f"{tally.preemptions} preemptions, {time.perf_counter() - started:.0f} s"
        )
    assert len(texts) == 20
    assert tally.tokens == 20 * NEW_TOKENS
    assert (tally.preemptions > 0) == (mode is CROWDED)
