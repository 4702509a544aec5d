"""File pages in a real control group: what is written and read does not push against its limit."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from penstock.testing.cage import Cage, NoCage

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_BYTES = 128 << 20
BLOCK_BYTES = 1 << 20
BLOCKS = 320

# Writes and reads far more than the group has room for.
SCRIPT = f"""
import os, sys
from pathlib import Path
from penstock.tiers import DiskTier, Outcome, Payload, Quota

tier = DiskTier(Path(sys.argv[1]), Quota(1 << 40), "model", frugal=sys.argv[2] == "frugal")
block, into = os.urandom({BLOCK_BYTES}), bytearray({BLOCK_BYTES})
for number in range({BLOCKS}):
    key = number.to_bytes(16, "big")
    assert tier.save(key, [Payload("attention", block)]) is Outcome.SAVED
    assert tier.load(key, [Payload("attention", into)])
    assert into == block
"""


def write_and_read(directory: Path, how: str) -> tuple[int, int]:
    """How often the group's limit was hit, and the most that was charged."""
    try:
        cage = Cage(LIMIT_BYTES)
    except NoCage as reason:
        pytest.skip(str(reason))
    with cage:
        command = [sys.executable, "-c", SCRIPT, str(directory), how]
        subprocess.run(cage.command(command), check=True, timeout=120)
        return cage.pushed(), cage.highest_bytes()


def test_a_frugal_tier_leaves_the_group_its_memory(tmp_path: Path) -> None:
    pushed, _ = write_and_read(tmp_path / "plain", "plain")
    assert pushed > 0, "there was room for all pages, so nothing is proven"
    pushed, highest = write_and_read(tmp_path / "frugal", "frugal")
    assert pushed == 0
    assert highest < LIMIT_BYTES * 3 // 4
