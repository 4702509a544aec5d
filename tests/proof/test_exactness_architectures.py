"""Every architecture, 12 prompts up to 400 tokens, 48 new tokens each, in every mode."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from penstock.testing import tiny
from penstock.testing.exactness import MODES, Mode, Reference, Tally, compare_mode

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.proof, pytest.mark.usefixtures("one_thread")]

LENGTHS = (1, 2, 15, 16, 17, 24, 25, 40, 65, 130, 260, 400)
NEW_TOKENS = 48
CROWDED = Mode("crowded", step_tokens=64, pool_tokens=464)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("architecture", tiny.SERVED)
def test_tokens_equal_transformers(
    tmp_path: Path, architecture: str, kv_dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In 8 bits: of transformers over keys and values that are rounded the same way."""
    folder = tiny.save(architecture, tmp_path)
    reference = Reference.load(folder, kv_dtype)
    texts = [tiny.prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    total = Tally()
    for mode in (*MODES, CROWDED):
        mode = replace(mode, kv_dtype=kv_dtype)  # noqa: PLW2901 - the same otherwise
        tally = compare_mode(reference, folder, mode, texts, NEW_TOKENS)
        assert tally.tokens == len(LENGTHS) * NEW_TOKENS
        assert (tally.preemptions > 0) == (mode.name == CROWDED.name)
        total.tokens += tally.tokens
        total.ties += tally.ties
    with capsys.disabled():
        print(  # noqa: T201 - what docs/proof.md records
            f"\n{architecture}, KV {kv_dtype}: {total.tokens} tokens, {total.ties} ties, "
            "0 mismatches"
        )
