"""`penstock pull` has kernels compiled beside it where there are none yet."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock.cli import models

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module that is compiled last, in a package of its own."""
    folder = tmp_path / "worker/backends/cpu/kernels/one_call"
    folder.mkdir(parents=True)
    monkeypatch.setattr(penstock, "__file__", str(tmp_path / "__init__.py"))
    (folder / "layer_loops.py").touch()
    return folder / "layer_loops.py"


def test_kernels_are_there_if_they_are_newer_than_their_source(source: Path) -> None:
    assert not models._are_compiled()
    cache = source.parent / "__pycache__"
    cache.mkdir()
    index = cache / "layer_loops._run-1.py311.nbi"
    index.touch()
    os.utime(index, (100, 100))
    os.utime(source, (200, 200))
    assert not models._are_compiled()
    os.utime(index, (300, 300))
    assert models._are_compiled()


def test_they_are_compiled_by_a_process_that_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[list[str]] = []
    real = subprocess.Popen

    def start(command: list[str], **how: Any) -> Any:
        started.append(command)
        return real([sys.executable, "-c", f"open({str(tmp_path / 'done')!r}, 'w')"], **how)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(models, "_are_compiled", lambda: False)
    with models._compiled_beside():
        pass
    assert (tmp_path / "done").exists()
    assert started[0][-2:] == ["-m", "penstock.worker.backends.preload"]
    monkeypatch.setattr(models, "_are_compiled", lambda: True)
    with models._compiled_beside():
        pass
    assert len(started) == 1


def test_a_pull_that_fails_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real, started = subprocess.Popen, []

    def start(command: list[str], **how: Any) -> Any:
        started.append(real([sys.executable, "-c", "import time; time.sleep(600)"], **how))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(models, "_are_compiled", lambda: False)
    with pytest.raises(ValueError, match="no such model"), models._compiled_beside():
        raise ValueError("no such model")
    assert started[0].returncode is not None
