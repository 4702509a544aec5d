"""The walls are real: each test runs in a process of its own and meets them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.server.processes.fork_server_client import WORKER_ENVIRONMENT

INNER = """
import resource
import numpy, torch
from penstock.catalog.kv_formats import kv_format
from penstock.worker.backends.caps import is_out_of_memory
from penstock.worker.backends.cpu import CpuBackend
from penstock.worker.backends.cpu.caps import RamCap
from penstock.worker.kv.arena import Arena, BlockLayout, LayerGeometry

layout = BlockLayout((LayerGeometry(8, 64, 64),), 16, kv_format("auto", "float32"))
arena = Arena(layout, 1024, CpuBackend())
torch.ones(64) @ torch.ones(64)
cap = RamCap(arena, None)
cap.set_base()
cap.move(0, 256 << 20)
torch.empty(200 << 20, dtype=torch.uint8)

def refused(allocate):
    try:
        allocate()
    except (MemoryError, RuntimeError) as error:
        return is_out_of_memory(error)
    return False

size = 300 << 20
assert refused(lambda: torch.empty(size, dtype=torch.uint8)), "torch"
assert refused(lambda: numpy.empty(size, dtype=numpy.uint8)), "numpy"
assert refused(lambda: bytearray(size)), "Python"
cap.move(0, 1 << 20)
assert refused(lambda: [arena.commit(n) for n in range(1)]), "arena"
cap.move(1024 * arena.block_bytes, 256 << 20)
arena.commit(0)
torch.empty(200 << 20, dtype=torch.uint8)
cap.move(0, 512 << 20)
torch.empty(size, dtype=torch.uint8)
print("held")
"""

HOLES = """
import ctypes, torch
from penstock.catalog.kv_formats import kv_format
from penstock.worker.backends.caps import is_out_of_memory
from penstock.worker.backends.cpu import CpuBackend
from penstock.worker.backends.cpu.caps import RamCap
from penstock.worker.kv.arena import Arena, BlockLayout, LayerGeometry
from penstock.worker.backends.cpu.meter import RamMeter

layout = BlockLayout((LayerGeometry(8, 64, 64),), 16, kv_format("auto", "float32"))
arena = Arena(layout, 64, CpuBackend())
cap, meter = RamCap(arena, None), RamMeter()
cap.set_base()
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
    assert is_out_of_memory(error)
else:
    raise SystemExit("the holes do not count")
moved = cap.allow_fragmentation(taken)
assert 50 << 20 < moved < 90 << 20, moved
large()
try:
    torch.empty(100 << 20, dtype=torch.uint8)
except RuntimeError as error:
    assert is_out_of_memory(error)
else:
    raise SystemExit("the wall is gone")
assert cap.allow_fragmentation(taken + moved) == -moved, "what is held counts again"
print("allowed")
"""

OUTER = """
import sys, torch
from penstock.worker.backends.cpu.caps import OuterCap
outer = OuterCap.enter()
if outer is None:
    print("none")
    sys.exit()
print(outer.group, flush=True)
outer.set_base(0)
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
    assert done.stdout.strip() == "allowed", done.stderr


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
