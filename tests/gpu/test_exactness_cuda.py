"""On a GPU too: greedy tokens of eager transformers in float32, in every way of batching."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from penstock.testing import tiny
from penstock.testing.exactness import MODES, Mode, Reference, compare_mode

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LENGTHS = (1, 2, 15, 16, 17, 24, 25, 40, 65, 130)
NEW_TOKENS = 24
CROWDED = Mode("crowded", step_tokens=64, pool_tokens=240, give_way_every=7)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("architecture", tiny.SERVED)
def test_tokens_equal_transformers(tmp_path: Path, architecture: str, kv_dtype: str) -> None:
    """In 8 bits: of transformers over keys and values that are rounded the same way."""
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = tiny.save(architecture, tmp_path)
    reference = Reference.load(folder, kv_dtype)
    texts = [tiny.prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    for mode in (MODES[1], MODES[3], MODES[4], CROWDED):
        tally = compare_mode(
            reference, folder, replace(mode, kv_dtype=kv_dtype), texts, NEW_TOKENS, device="cuda:0"
        )
        assert tally.tokens == len(LENGTHS) * NEW_TOKENS
        assert (tally.preemptions > 0) == (mode is CROWDED)
