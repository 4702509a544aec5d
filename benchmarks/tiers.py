"""The disk tier against plain files: the same bytes, written and read, with and without its work.

    python -m benchmarks.tiers [--dir FOLDER] [--total-mb 512] [--rounds 5]

Plain is one open, one write or read and one close a block, with no checksum, name or count. Each
round does both, in turn; rates are medians. `cached` reads what the page cache holds, `disk` what
was dropped from it before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import median, record
from penstock.tiers import DiskTier, Outcome, Payload, Quota

if TYPE_CHECKING:
    from collections.abc import Callable

# 16 tokens of KV: SmolLM2-135M in float32, an 8B model with 8 KV heads in bfloat16.
BLOCKS = {"smollm2-135m float32": 16 * 46_080, "qwen3-8b bfloat16": 16 * 147_456}


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def rate(size: int, act: Callable[[], None]) -> float:
    started = time.perf_counter()
    act()
    return size / (time.perf_counter() - started) / 1e9


def drop_pages(folder: Path) -> None:
    """Out of the page cache, as after a restart of the machine."""
    os.sync()
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def write_plain(folder: Path, data: memoryview, count: int) -> None:
    for number in range(count):
        descriptor = os.open(folder / str(number), os.O_CREAT | os.O_WRONLY, 0o600)
        assert os.write(descriptor, data) == len(data)
        os.close(descriptor)


def read_plain(folder: Path, into: memoryview, count: int) -> None:
    for number in range(count):
        descriptor = os.open(folder / str(number), os.O_RDONLY)
        assert os.preadv(descriptor, [into], 0) == len(into)
        os.close(descriptor)


def write_tier(tier: DiskTier, data: memoryview, count: int) -> None:
    for number in range(count):
        assert tier.save(key(number), [Payload("attention", data)]) is Outcome.SAVED


def read_tier(tier: DiskTier, into: memoryview, count: int) -> None:
    for number in range(count):
        assert tier.load(key(number), [Payload("attention", into)])


def measure(place: Path, block: int, total: int) -> dict[str, float]:
    """One round in fresh folders."""
    count, data, into = total // block, memoryview(os.urandom(block)), memoryview(bytearray(block))
    plain, cache = place / "plain", place / "cache"
    plain.mkdir()
    tier = DiskTier(cache, Quota(4 * total), "benchmark")
    size = count * block
    rates = {
        "write plain": rate(size, lambda: write_plain(plain, data, count)),
        "write tier": rate(size, lambda: write_tier(tier, data, count)),
    }
    for state in ("cached", "disk"):
        if state == "disk":
            drop_pages(plain)
            drop_pages(cache)
        rates[f"read {state} plain"] = rate(size, lambda: read_plain(plain, into, count))
        rates[f"read {state} tier"] = rate(size, lambda: read_tier(tier, into, count))
    started = time.perf_counter()
    DiskTier(cache, Quota(4 * total), "benchmark")
    rates["open us/file"] = (time.perf_counter() - started) / count * 1e6
    shutil.rmtree(plain)
    shutil.rmtree(cache)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, help="where; default: the temporary folder")
    parser.add_argument("--total-mb", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="tiers-", dir=options.dir))
    try:
        for name, block in BLOCKS.items():
            rounds = [measure(place, block, options.total_mb << 20) for _ in range(options.rounds)]
            medians = {what: median([each[what] for each in rounds]) for what in rounds[0]}
            record(f"tiers {name}", {what: round(value, 2) for what, value in medians.items()})
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
