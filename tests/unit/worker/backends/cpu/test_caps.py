"""What counts as a failed allocation, and where the outer wall stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from penstock.worker.backends.caps import is_out_of_memory
from penstock.worker.backends.cpu import caps

if TYPE_CHECKING:
    from pathlib import Path


def test_no_outer_wall_where_memory_is_not_handed_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caps, "memory_groups", lambda: iter([(tmp_path, ("memory.max", "used"))]))
    assert caps.OuterCap.enter() is None
    assert list(tmp_path.iterdir()) == [], "an empty group was left behind"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("the memory of the step"), False),
        (ValueError("std::bad_alloc"), False),
    ],
)
def test_only_a_failed_allocation_counts_as_one(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_the_outer_wall_leaves_room_for_mapped_files_that_come_back(tmp_path: Path) -> None:
    (tmp_path / "used").write_text(str(100 << 20))
    outer = caps.OuterCap(tmp_path, "limit", "used")
    outer.set_base(0)
    outer.move(64 << 20)
    before = int((tmp_path / "limit").read_text())
    outer.mapped_bytes = 500 << 20
    outer.move(64 << 20)
    assert int((tmp_path / "limit").read_text()) >= before + outer.mapped_bytes
