"""The long form of the hard-cap runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from penstock import shapes
from penstock.testing import hard_cap
from penstock.testing.cage import NoCage

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.proof

HANG_S = 600.0  # long runs share the machine with others, and say nothing of speed
# Fewer requests than the claim asks for, to try it.
TRIED = os.environ.get("PENSTOCK_HARD_CAP_REQUESTS")


def run(
    folder: Path,
    memory: str,
    log: Path,
    count: int,
    capsys: pytest.CaptureFixture[str],
    **settings: str,
) -> hard_cap.Report:
    rush = hard_cap.Rush(int(TRIED or count), seed=7, hang_s=HANG_S)
    try:
        report = hard_cap.run(folder, memory, log, rush, **settings)
    except NoCage as reason:
        pytest.skip(f"no control group to run in: {reason}")
    with capsys.disabled():
        print(f"\n{folder.name} at {memory}: {report}")  # noqa: T201 - what docs/proof.md records
    hard_cap.check(report)
    return report


def test_a_thousand_requests_to_the_starter(
    starter_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(starter_folder, "2GiB", tmp_path / "serve.log", 1_000, capsys)
    assert report.tally.refusals("window") >= 0.15 * len(report.tally.outcomes)


def test_ten_thousand_requests_to_a_model_whose_kv_is_large(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models" / "big-kv"
    folder.mkdir(parents=True)
    shapes.write_folder("random:big-kv", folder)
    # As in the short form: prompts take many steps.
    small = {"PENSTOCK_MODELS_STEP_TOKENS": "128", "PENSTOCK_MODELS_STEP_SEQUENCES": "32"}
    report = run(folder, "896MiB", tmp_path / "serve.log", 10_000, capsys, **small)
    assert report.tally.refusals("memory") >= 0.1 * len(report.tally.outcomes)
    assert report.tally.count("alone", "answer") >= 0.05 * len(report.tally.outcomes)
