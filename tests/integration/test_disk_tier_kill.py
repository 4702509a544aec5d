"""Processes that are killed while they write to one cache directory, again and again.

Three at once: two of the same model, one of another. Some are killed, some of them all; then
another process looks: no more bytes than the quota at any time, every file is whole, what the dead
left half-written is gone, and what was saved is served.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from penstock.testing.faulty_files import directory_bytes
from penstock.testing.tier_hammer import KEYS, is_right
from penstock.tiers import DiskTier, Quota

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 8 << 20  # far less than the 2 x 400 blocks that are offered
MODELS = ("one", "two", "one")
_LOCK_TRIES = 5


def start(directory: Path, fingerprint: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "penstock.testing.tier_hammer"),
            *(str(directory), str(LIMIT), fingerprint),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL, "it had ended by itself"
    assert process.stdout is not None
    process.stdout.close()


def watch(directory: Path, seconds: float) -> None:
    """The quota holds while they write. A file may vanish during the walk: then look again."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            assert directory_bytes(directory) <= LIMIT
        except FileNotFoundError:
            continue


def survey(directory: Path, others_alive: bool) -> int:
    """Look as the next process would; how many blocks it is served."""
    assert directory_bytes_now(directory) <= LIMIT
    hits = 0
    for model in set(MODELS):
        tier = DiskTier(directory, Quota(LIMIT), model)
        for _ in range(_LOCK_TRIES):
            if tier.problem is not None and others_alive:
                tier.refresh()  # the others keep the lock busy
        assert tier.problem is None
        if not others_alive:
            assert not list(directory.glob("*.part"))
            assert tier.store.held_bytes == directory_bytes(directory)
            verified = tier.store.verify()
            assert not verified.bad
            assert verified.files == len(list(directory.glob("*.kv")))
        found = [is_right(tier, model, number) for number in range(0, KEYS, 10)]
        assert False not in found
        assert tier.counters.bad_removed == 0
        hits += found.count(True)
    return hits


def directory_bytes_now(directory: Path) -> int:
    while True:
        try:
            return directory_bytes(directory)
        except FileNotFoundError:
            continue


def kill_often(directory: Path, kills: int) -> None:
    source = random.Random(kills)
    processes = [start(directory, model) for model in MODELS]
    done = hits = 0
    try:
        while done < kills:
            for process in processes:
                if process.stdout is not None and not process.stdout.readline():
                    raise AssertionError(f"it ended with {process.wait()}")
            watch(directory, source.uniform(0.02, 0.2))
            doomed = source.choice([[0], [1], [0, 2], [0, 1, 2], [0, 1, 2]])
            for index in doomed:
                end(processes[index])
            done += len(doomed)
            hits += survey(directory, others_alive=len(doomed) < len(processes))
            for index in range(len(MODELS)):
                if index not in doomed:
                    end(processes[index])
            processes = [start(directory, model) for model in MODELS]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    assert hits > 0
    print(f"\n{done} kills, {hits} blocks served in between")  # noqa: T201


def test_killed_while_writing(tmp_path: Path) -> None:
    kill_often(tmp_path / "cache", 5)


@pytest.mark.proof
def test_killed_while_writing_long(tmp_path: Path) -> None:
    kill_often(tmp_path / "cache", 50)
