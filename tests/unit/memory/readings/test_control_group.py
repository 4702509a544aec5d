"""Groups of workers are removed by whoever outlives them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from penstock.memory.readings import control_group
from penstock.memory.readings.control_group import remove_group, remove_leftovers, worker_group

if TYPE_CHECKING:
    from pathlib import Path

MAX_PID = 1 << 22  # Linux gives no process a number above it


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of a control group: both are removed by `rmdir`, and only if empty."""
    monkeypatch.setattr(control_group, "memory_groups", lambda: iter([(tmp_path, ("", ""))]))
    return tmp_path


def test_the_group_of_an_ended_worker_is_removed(parent: Path) -> None:
    worker_group(parent, 77).mkdir()
    assert remove_group(77)
    assert not remove_group(77)
    assert list(parent.iterdir()) == []


def test_only_groups_whose_worker_is_gone_are_left_behind(parent: Path) -> None:
    ours, left = worker_group(parent, os.getpid()), worker_group(parent, MAX_PID + 1)
    other, full = parent / "penstock-x", worker_group(parent, MAX_PID + 2)
    for group in (ours, left, other, full):
        group.mkdir()
    (full / "cgroup.procs").write_text("")
    assert remove_leftovers() == 1
    assert set(parent.iterdir()) == {ours, other, full}
