"""What steps were predicted to take, and what they took: 200 shapes that no profile has tried."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from penstock.testing import tiny
from penstock.testing.envelope import describe
from penstock.testing.measured_steps import measured_steps
from penstock.wire import LoadSpec

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.testing.envelope import MeasuredStep

pytestmark = pytest.mark.proof

MIB = 1 << 20
STEPS = 200
SEED = int(os.environ.get("ENVELOPE_SEED", "2"))  # of the shapes
# Steps of 40 MB and more: the margin for noise does not shrink with the model.
WIDE = {"hidden_size": 256, "intermediate_size": 12288}
SPARSE = {**WIDE, "moe_intermediate_size": 16384, "num_experts": 4, "num_hidden_layers": 2}


def judge(steps: list[MeasuredStep], record: pytest.CaptureFixture[str]) -> None:
    with record.disabled():
        print(f"\n{describe(steps)}")  # noqa: T201 - the figures of the proof
    for step in steps:
        assert step.measured_bytes <= step.predicted_bytes, step
    for step in steps[-(len(steps) // 10) :]:
        assert step.predicted_bytes <= 1.25 * step.measured_bytes, step


def test_the_starter_model(starter_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = LoadSpec(
        starter_folder.name, str(starter_folder), "cpu", "float32", 1200 * MIB, capped=False
    )
    judge(measured_steps(spec, STEPS, seed=SEED, timeout_s=3600), capsys)


@pytest.mark.parametrize(
    ("architecture", "changes"), [("llama", WIDE), ("gemma2", WIDE), ("qwen3_moe", SPARSE)]
)
def test_tiny_models(
    architecture: str,
    changes: dict[str, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tiny.save(architecture, tmp_path / architecture, **changes)
    spec = LoadSpec(
        *(folder.name, str(folder), "cpu", "float32", 256 * MIB),
        step_tokens=512,
        step_sequences=16,
        threads=1,
        capped=False,
    )
    judge(measured_steps(spec, STEPS, seed=SEED, timeout_s=1200), capsys)
