"""On a GPU too: what steps of any shape take is within what was predicted, and close to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from penstock.testing import tiny
from penstock.testing.envelope import describe
from penstock.testing.measured_steps import measured_steps
from penstock.wire import LoadSpec

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

STEPS = 200
# Steps of hundreds of megabytes: torch takes memory from the device in pieces of 2 to 20 MiB.
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 12288,
    "num_hidden_layers": 2,
    "max_position_embeddings": 8192,
}
SPARSE = {**WIDE, "moe_intermediate_size": 6144, "num_experts": 4}


@pytest.mark.parametrize(("architecture", "changes"), [("llama", WIDE), ("qwen3_moe", SPARSE)])
def test_the_envelope_is_true_and_tight(
    architecture: str,
    changes: dict[str, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tiny.save(architecture, tmp_path / architecture, **changes)
    spec = LoadSpec(
        *(folder.name, str(folder), "cuda:0", "bfloat16", 8 << 30),
        step_tokens=4096,
        step_sequences=64,
        capped=False,
    )
    steps = measured_steps(spec, STEPS)
    with capsys.disabled():
        print(f"\n{describe(steps)}")  # noqa: T201 - the figures are recorded
    for step in steps:
        assert step.measured_bytes <= step.predicted_bytes, step
    for step in steps[-(len(steps) // 10) :]:
        assert step.predicted_bytes <= 1.25 * step.measured_bytes, step
