"""The short form of the hard-cap runs; the long one is under `make proof`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock import shapes
from penstock.testing import hard_cap
from penstock.testing.cage import NoCage

if TYPE_CHECKING:
    from pathlib import Path


def run(folder: Path, memory: str, log: Path, count: int, **settings: str) -> hard_cap.Report:
    try:
        return hard_cap.run(folder, memory, log, hard_cap.Rush(count, seed=1), **settings)
    except NoCage as reason:
        pytest.skip(f"no control group to run in: {reason}")


def test_the_starter_in_two_gib(starter_folder: Path, tmp_path: Path) -> None:
    report = run(starter_folder, "2GiB", tmp_path / "serve.log", 120)
    print(report)  # noqa: T201 - shown when it fails
    hard_cap.check(report)
    assert report.tally.refusals("window") >= 15


def test_a_model_whose_kv_is_large(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "big-kv"
    folder.mkdir(parents=True)
    shapes.write_folder("random:big-kv", folder)
    # Small steps are quickly measured, and a prompt then takes many of them.
    small = {"PENSTOCK_MODELS_STEP_TOKENS": "128", "PENSTOCK_MODELS_STEP_SEQUENCES": "32"}
    report = run(folder, "896MiB", tmp_path / "serve.log", 160, **small)
    print(report)  # noqa: T201
    hard_cap.check(report)
    assert report.tally.refusals("memory") >= 25
    assert report.tally.count("alone", "answer") >= 8
