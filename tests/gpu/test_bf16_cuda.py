"""bfloat16 on a GPU is as near to float32 as transformers' own eager bfloat16 is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from penstock.testing import tiny
from penstock.testing.rounding import rounding_errors

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("architecture", tiny.SERVED)
def test_the_error_is_at_most_one_and_a_half_times_that_of_eager(
    tmp_path: Path, architecture: str
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = tiny.save(architecture, tmp_path)
    ours, eager = rounding_errors(folder, "cuda:0", seed=len(architecture))
    print(f"{architecture}: {ours:.2e}, eager {eager:.2e}")  # noqa: T201 - shown with -rP
    assert ours <= 1.5 * eager
