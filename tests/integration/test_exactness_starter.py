"""The starter model's greedy tokens equal transformers': a selection of what `make proof` runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.catalog import read_card
from penstock.catalog.kv_formats import kv_format
from penstock.errors import PullFailed
from penstock.sources import pull
from penstock.testing import prompts
from penstock.testing.divergence import divergence, tokens_of
from penstock.testing.exactness import Mode, Reference, compare_mode, start_engine

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (150, 120, 33, 1, 260)
NEW_TOKENS = 16
CONTEXT = 512
# The first two requests outgrow it together.
CROWDED = Mode("crowded", step_tokens=128, pool_tokens=288, max_context=CONTEXT)
ARRIVALS = Mode("arrivals", step_tokens=64, arrive_every=3, max_context=CONTEXT)


@pytest.fixture(scope="module")
def reference(starter_folder: Path) -> Reference:
    return Reference.load(starter_folder)


@pytest.mark.parametrize("mode", [ARRIVALS, CROWDED], ids=str)
def test_tokens_equal_transformers(reference: Reference, starter_folder: Path, mode: Mode) -> None:
    texts = prompts.build(starter_folder / "tokenizer.json", LENGTHS)
    tally = compare_mode(reference, starter_folder, mode, texts, NEW_TOKENS)
    assert tally.tokens == len(LENGTHS) * NEW_TOKENS
    assert (tally.preemptions > 0) == (mode is CROWDED)


def test_kv_in_8_bits_hardly_moves_predictions(reference: Reference, starter_folder: Path) -> None:
    """`make proof` does the same over more text."""
    page = Path(__file__).parents[2] / "docs" / "architecture.md"
    ids = tokens_of(starter_folder, [page], 769)
    found = divergence(reference.model, starter_folder, ids)
    assert found.tokens == 768
    assert 1e-6 < found.kl / found.tokens <= 2e-3, found.figures()  # and it is rounded
    assert found.same_top >= 0.95 * found.tokens
    plain = read_card(starter_folder).kv_cost(kv_format("auto", "bfloat16"), 16, 513, 64)
    assert plain.token_bytes >= 1.9 * found.token_bytes


@pytest.fixture(scope="module")
def packed_starter(starter_folder: Path) -> Path:
    """The same model as the GGUF file that it comes in."""
    home, name = starter_folder.parent.parent, f"{starter_folder.name}-GGUF"
    try:
        return pull("smollm2", home, lambda *_: None, name=name, convert="none").path
    except PullFailed as error:
        pytest.skip(f"the starter's own file cannot be fetched: {error.message}")


@pytest.mark.parametrize("mode", [ARRIVALS, CROWDED], ids=str)
def test_the_packed_file_gives_the_tokens_of_its_numbers(
    reference: Reference, packed_starter: Path, mode: Mode
) -> None:
    texts = prompts.build(packed_starter / "tokenizer.json", LENGTHS)
    tally = compare_mode(reference, packed_starter, mode, texts, NEW_TOKENS)
    assert tally.tokens == len(LENGTHS) * NEW_TOKENS


def test_the_packed_file_takes_its_own_size_in_memory(packed_starter: Path) -> None:
    file = next(packed_starter.glob("*.gguf"))
    ready = start_engine(
        packed_starter, Mode("alone", step_tokens=64, step_sequences=4, max_context=CONTEXT)
    ).ready()
    assert ready.weight_bytes <= 1.1 * file.stat().st_size
    assert ready.copied_bytes <= 0.2 * file.stat().st_size  # q and k, and the tile
    assert read_card(packed_starter).parameters == 134515008
