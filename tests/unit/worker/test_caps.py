"""The walls are real: each test runs in a process of its own and meets them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.server.template import WORKER_ENVIRONMENT
from penstock.worker import caps

INNER = """
import resource
import numpy, torch
from penstock.worker.caps import RamCap, exhausted
from penstock.worker.kv.arena import Arena, BlockLayout, LayerGeometry

layout = BlockLayout((LayerGeometry(8, 64, 64),), 16, torch.float32)
arena = Arena(layout, 1024, torch.device("cpu"))
torch.ones(64) @ torch.ones(64)
cap = RamCap(arena, None)
cap.settle()
cap.move(0, 256 << 20)
torch.empty(200 << 20, dtype=torch.uint8)

def refused(allocate):
    try:
        allocate()
    except (MemoryError, RuntimeError) as error:
        return exhausted(error)
    return False

size = 300 << 20
assert refused(lambda: torch.empty(size, dtype=torch.uint8)), "torch"
assert refused(lambda: numpy.empty(size, dtype=numpy.uint8)), "numpy"
assert refused(lambda: bytearray(size)), "Python"
cap.move(0, 1 << 20)
assert refused(lambda: [arena.commit(n) for n in range(1)]), "arena"
cap.move(arena.bytes_for(1024), 256 << 20)
arena.commit(0)
torch.empty(200 << 20, dtype=torch.uint8)
cap.move(0, 512 << 20)
torch.empty(size, dtype=torch.uint8)
print("held")
"""

HOLES = """
import ctypes, torch
from penstock.worker.caps import RamCap, exhausted
from penstock.worker.kv.arena import Arena, BlockLayout, LayerGeometry
from penstock.worker.meter import RamMeter

arena = Arena(BlockLayout((LayerGeometry(8, 64, 64),), 16, torch.float32), 64, torch.device("cpu"))
cap, meter = RamCap(arena, None), RamMeter()
cap.settle()
cap.move(0, 96 << 20)
base = meter.held()
pins, pieces = [], []
for _ in range(64):  # each piece has something behind it that stays
    pieces.append(torch.ones(1 << 18))
    pins.append(torch.ones(1 << 14))
del pieces
meter.drop_caches()
taken = meter.held() - base
assert taken < 8 << 20, taken

def large():
    torch.empty(64 << 20, dtype=torch.uint8)

try:
    large()
except RuntimeError as error:
    assert exhausted(error)
else:
    raise SystemExit("the holes do not count")
moved = cap.excuse(taken)
assert 50 << 20 < moved < 90 << 20, moved
large()
try:
    torch.empty(100 << 20, dtype=torch.uint8)
except RuntimeError as error:
    assert exhausted(error)
else:
    raise SystemExit("the wall is gone")
assert cap.excuse(taken + moved) == -moved, "what is held counts again"
print("excused")
"""

OUTER = """
import sys, torch
from penstock.worker.caps import OuterCap
outer = OuterCap.enter()
if outer is None:
    print("none")
    sys.exit()
print(outer.group, flush=True)
outer.settle(0)
outer.move(64 << 20)
within = bytearray(100 << 20)
print("within", flush=True)
beyond = bytearray(1 << 30)
print("beyond", flush=True)
"""


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_beyond_the_inner_wall_every_allocator_fails_with_an_error_that_is_known() -> None:
    done = run(INNER)
    assert done.stdout.strip() == "held", done.stderr


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_holes_of_the_heap_do_not_count_against_the_grant() -> None:
    # Huge pages would make it a matter of chance which of them are given back.
    done = run(HOLES, **WORKER_ENVIRONMENT | {"GLIBC_TUNABLES": ""})
    assert done.stdout.strip() == "excused", done.stderr


def test_behind_the_outer_wall_only_its_own_process_is_killed() -> None:
    done = run(OUTER)
    group, *said = done.stdout.split()
    if group == "none":
        pytest.skip("no control group can be made here")
    try:
        assert said == ["within"], done.stderr
        assert done.returncode == -9
    finally:
        Path(group).rmdir()


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
    assert caps.exhausted(error) is expected


def test_the_outer_wall_leaves_room_for_mapped_files_that_come_back(tmp_path: Path) -> None:
    (tmp_path / "used").write_text(str(100 << 20))
    outer = caps.OuterCap(tmp_path, "limit", "used")
    outer.settle(0)
    outer.move(64 << 20)
    before = int((tmp_path / "limit").read_text())
    outer.mapped_bytes = 500 << 20
    outer.move(64 << 20)
    assert int((tmp_path / "limit").read_text()) >= before + outer.mapped_bytes
