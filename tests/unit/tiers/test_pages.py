"""File pages where memory is little: when they are dropped, and that nothing depends on it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from penstock.testing.faulty_files import FaultyFiles
from penstock.tiers import DiskTier, Outcome, Payload, Quota
from penstock.tiers.format import block_name, model_digest

if TYPE_CHECKING:
    from pathlib import Path

PLENTY = Quota(1 << 30)
SIZE = 64 << 10
BEHIND = 8


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def save(tier: DiskTier, number: int) -> None:
    assert tier.save(key(number), [Payload("attention", bytes([number]) * SIZE)]) is Outcome.SAVED


def load(tier: DiskTier, number: int) -> None:
    into = bytearray(SIZE)
    assert tier.load(key(number), [Payload("attention", into)])
    assert into == bytes([number]) * SIZE


def in_memory(directory: Path, number: int) -> int:
    """Pages of a block's file that the kernel holds."""
    return held_of(directory / block_name(model_digest("model"), key(number)))


def held_of(path: Path) -> int:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        held = (ctypes.c_ubyte * pages)()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), len(mapped), held) == 0
        return sum(page & 1 for page in held)


def can_drop(probe: Path) -> bool:
    """Not on a file system that is all memory."""
    probe.write_bytes(b"x" * SIZE)
    with probe.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return held_of(probe) == 0


def test_pages_leave_some_files_later_and_after_a_read(tmp_path: Path) -> None:
    if not can_drop(tmp_path / "probe"):
        pytest.skip("pages of files here cannot be dropped")
    tier = DiskTier(tmp_path, PLENTY, "model", frugal=True)
    for number in range(BEHIND + 4):
        save(tier, number)
    assert [in_memory(tmp_path, number) for number in range(4)] == [0] * 4
    tier.refresh()
    assert not any(in_memory(tmp_path, number) for number in range(BEHIND + 4))
    load(tier, 2)
    assert in_memory(tmp_path, 2) == 0


def test_where_memory_is_plenty_they_stay(tmp_path: Path) -> None:
    files = FaultyFiles(tmp_path)
    calls: Counter[str] = Counter()
    files.after_each = lambda name: calls.update([name])
    tier = DiskTier(tmp_path, PLENTY, "model", files)
    for number in range(2 * BEHIND):
        save(tier, number)
    load(tier, 0)
    tier.refresh()
    assert not calls["drop_pages"] and not calls["wait_written"]
    assert in_memory(tmp_path, 0) > 0


def test_each_file_is_asked_twice_and_waited_for_once(tmp_path: Path) -> None:
    files = FaultyFiles(tmp_path)
    calls: Counter[str] = Counter()
    files.after_each = lambda name: calls.update([name])
    tier = DiskTier(tmp_path, PLENTY, "model", files, frugal=True)
    for number in range(BEHIND):
        save(tier, number)
    assert (calls["drop_pages"], calls["wait_written"]) == (BEHIND, 0)
    for number in range(BEHIND, 3 * BEHIND):
        save(tier, number)
    assert (calls["drop_pages"], calls["wait_written"]) == (5 * BEHIND, 2 * BEHIND)
    tier.refresh()
    assert (calls["drop_pages"], calls["wait_written"]) == (6 * BEHIND, 3 * BEHIND)
    tier.refresh()
    assert calls["drop_pages"] == 6 * BEHIND
    assert not files._opened


@pytest.mark.parametrize("call", ["drop_pages", "wait_written"])
def test_a_call_that_fails_costs_nothing(tmp_path: Path, call: str) -> None:
    files = FaultyFiles(tmp_path)
    files.broken[call] = "EIO"
    tier = DiskTier(tmp_path, PLENTY, "model", files, frugal=True)
    for number in range(2 * BEHIND):
        save(tier, number)
        load(tier, number)
    tier.refresh()
    assert tier.problem is None
    assert not files._opened


def test_files_that_are_gone_are_passed_over(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, PLENTY, "model", frugal=True)
    for number in range(BEHIND):
        save(tier, number)
    tier.store.clear()
    for number in range(BEHIND, 2 * BEHIND):
        save(tier, number)
    tier.refresh()
    assert tier.problem is None
