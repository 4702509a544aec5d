"""The writer before the disk: what it drops, how it fails, and the races with a file half-written.

The writer is held in the middle of a file, by its real system calls, while others act.
"""

from __future__ import annotations

import fcntl
import random
import shutil
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from penstock.testing.faulty_files import FaultyFiles, directory_bytes
from penstock.tiers import DiskTier, Outcome, Payload, Quota, Store, Writer
from penstock.tiers.format import PAGE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLENTY = Quota(1 << 30)
SIZE = 5000
LONG_S = 20.0  # more than anything here takes


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def payloads(number: int) -> list[Payload]:
    return [Payload("attention", bytes([number % 256]) * SIZE)]


def is_count(call: str, arguments: tuple[Any, ...]) -> bool:
    """Whether it writes the record of the directory and no block."""
    return call == "write" and len(arguments[1]) < SIZE


class Rig:
    """A tier, its writer, and all that they have told."""

    def __init__(self, directory: Path, queue_bytes: int = 100 * SIZE, pause_s: float = 0.01):
        self.files = FaultyFiles(directory)
        self.directory = directory
        self.tier = DiskTier(directory, PLENTY, "model", self.files)
        self.events: list[str] = []
        self.released: list[tuple[int, Outcome]] = []
        self.writer = Writer(self.tier, queue_bytes, self.events.append, first_pause_s=pause_s)

    def offer(self, number: int) -> bool:
        return self.writer.offer(
            key(number),
            payloads(number),
            lambda outcome: self.released.append((number, outcome)),
        )

    def offer_when_it_is_taken(self, number: int) -> None:
        deadline = time.monotonic() + LONG_S
        while not self.offer(number):
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def load(self, number: int) -> bool:
        buffer = bytearray(SIZE)
        hit = self.tier.load(key(number), [Payload("attention", buffer)])
        assert not hit or buffer == payloads(number)[0].data
        return hit

    def blocks(self) -> int:
        return len(list(self.directory.glob("*.kv")))

    @contextmanager
    def held_at(self, call: str) -> Iterator[None]:
        """The writer's next such call for a block does not begin before this ends."""
        reached, go_on = threading.Event(), threading.Event()

        def before(name: str, *arguments: Any) -> None:
            if name == call and not is_count(name, arguments):
                reached.set()
                assert go_on.wait(LONG_S)

        self.files.before_each = before
        try:
            assert self.offer(1)
            assert reached.wait(LONG_S)
            yield
        finally:
            self.files.before_each = lambda name, *arguments: None
            go_on.set()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "cache")
    yield rig
    rig.writer.close(LONG_S)
    assert not list(rig.directory.glob("*.part"))


def test_what_is_offered_is_saved_and_released_once(rig: Rig) -> None:
    assert all(rig.offer(number) for number in range(20))
    assert rig.writer.flush(LONG_S)
    assert rig.released == [(number, Outcome.SAVED) for number in range(20)]
    assert all(rig.load(number) for number in range(20))
    assert not rig.offer(3), "it is there already"
    stats = rig.writer.stats()
    assert (stats["accepted"], stats["saved"], stats["queued_bytes"]) == (20, 20, 0)


def test_the_queue_is_bounded_in_bytes_and_an_offer_does_not_wait(tmp_path: Path) -> None:
    rig = Rig(tmp_path, queue_bytes=3 * SIZE)
    with rig.held_at("write"):
        assert rig.offer(2) and rig.offer(3)
        assert not rig.offer(2), "it is on its way"
        assert not rig.offer(4) and not rig.offer(5)
        assert rig.writer.stats()["dropped"] == 2
        assert not rig.writer.flush(0)
    assert rig.writer.flush(LONG_S)
    assert len(rig.events) == 1 and "cannot keep up" in rig.events[0]
    assert rig.offer(4)
    assert rig.writer.flush(LONG_S)
    assert [number for number, _ in rig.released] == [1, 2, 3, 4]
    assert rig.writer.close(LONG_S)
    assert not rig.offer(6)


# --- races with a file that is half-written ---


@pytest.mark.parametrize("by", ["the same process", "another"])
def test_nothing_reappears_after_a_clear(rig: Rig, by: str) -> None:
    rig.offer(0)
    rig.writer.flush(LONG_S)
    with rig.held_at("write"):
        assert rig.offer(2)
        store = rig.tier.store if by == "the same process" else Store(rig.directory, PLENTY)
        files, _ = store.clear()
        assert files == 2, "the one that was there and the one half-written"
    assert rig.writer.flush(LONG_S)
    assert rig.released[1:] == [(1, Outcome.CANCELLED), (2, Outcome.CANCELLED)]
    assert rig.blocks() == 0
    assert rig.offer(1) and rig.writer.flush(LONG_S)
    assert rig.load(1)
    rig.tier.store._stale = True
    rig.tier.refresh()
    assert rig.tier.store.held_bytes == directory_bytes(rig.directory)


def test_closing_does_not_hang_on_a_file_half_written(rig: Rig) -> None:
    with rig.held_at("write"):
        assert rig.offer(2)
        assert not rig.writer.close(timeout_s=0.05)
        assert rig.released == [(2, Outcome.CANCELLED)]
        assert not rig.offer(3)
    assert rig.writer.close(LONG_S)
    assert rig.released == [(2, Outcome.CANCELLED), (1, Outcome.SAVED)]
    assert rig.load(1)
    # The model is loaded again: a tier and a writer of its own lose nothing.
    again = Rig(rig.directory)
    assert again.offer(2) and again.writer.flush(LONG_S) and again.load(1) and again.load(2)
    again.writer.close()


def test_many_threads_and_every_offer_ends_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path, queue_bytes=8 * SIZE)
    accepted: list[int] = []

    def offer(seed: int) -> None:
        source = random.Random(seed)
        for _ in range(150):
            number = source.randrange(30)
            if rig.offer(number):
                accepted.append(number)
            chance = source.random()
            if chance < 0.03:
                rig.tier.store.clear()
            elif chance < 0.3:
                rig.load(source.randrange(30))

    threads = [threading.Thread(target=offer, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert rig.writer.flush(LONG_S)
    assert sorted(number for number, _ in rig.released) == sorted(accepted)
    stats = rig.writer.stats()
    assert stats["queued_bytes"] == 0
    ends = ("saved", "present", "no_room", "cancelled", "failed")
    assert stats["accepted"] == len(accepted) == sum(stats[end] for end in ends)
    assert not rig.tier.store.verify().bad
    assert rig.writer.close(LONG_S)


# --- a disk that fails ---


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        ("allocate", "ENOSPC", "No space left"),
        ("allocate", "EDQUOT", "quota exceeded"),
        ("write", "EIO", "Input/output"),
        ("open", "EROFS", "Read-only"),
        ("rename", "EIO", "Input/output"),
        ("try_lock", "EIO", "Input/output"),
    ],
)
def test_a_failing_disk_costs_hits_and_is_tried_again(
    tmp_path: Path, call: str, error: str, says: str
) -> None:
    rig = Rig(tmp_path, pause_s=0.05)
    rig.files.broken[call] = error
    assert rig.offer(1)
    assert rig.writer.flush(LONG_S)
    while not rig.events:
        time.sleep(0.001)
    assert rig.released == [(1, Outcome.FAILED)]
    assert says in rig.events[0]
    assert rig.writer.stats()["failing"]
    # It is asked less and less often, and tells only once.
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        rig.offer(2)
        time.sleep(0.005)
    rig.writer.flush(LONG_S)
    assert 1 <= rig.writer.stats()["failed"] <= 6
    assert rig.writer.stats()["refused"] > 10
    assert len(rig.events) == 1
    rig.files.broken.clear()
    rig.offer_when_it_is_taken(3)
    assert rig.writer.flush(LONG_S)
    assert rig.load(3)
    assert rig.events[1:] == ["The disk cache writes again."]
    assert rig.writer.close(LONG_S)
    assert not list(tmp_path.glob("*.part")) or call == "try_lock"


def test_a_stopped_process_with_the_lock_delays_no_load(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tiers.usage.LOCK_WAIT_S", 0.05)
    assert rig.offer(1) and rig.writer.flush(LONG_S)
    with (rig.directory / "usage").open("rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        assert rig.offer(2) and rig.writer.flush(LONG_S)
        assert rig.load(1)
    assert rig.released[1] == (2, Outcome.FAILED)
    rig.offer_when_it_is_taken(2)
    assert rig.writer.flush(LONG_S) and rig.load(2)


def test_what_waits_is_let_go_when_the_disk_fails(rig: Rig) -> None:
    with rig.held_at("write"):
        assert rig.offer(2) and rig.offer(3)
        rig.files.broken["write"] = "EIO"
    assert rig.writer.flush(LONG_S)
    assert rig.released == [(number, Outcome.FAILED) for number in (1, 2, 3)]
    assert rig.writer.stats()["queued_bytes"] == 0


def test_a_directory_that_vanishes_is_made_again(rig: Rig) -> None:
    with rig.held_at("write"):
        shutil.rmtree(rig.directory)
    assert rig.writer.flush(LONG_S)
    assert rig.released == [(1, Outcome.CANCELLED)]
    assert rig.offer(1) and rig.writer.flush(LONG_S)
    assert rig.load(1)
    shutil.rmtree(rig.directory)
    assert not rig.load(1)


def test_no_room_is_told_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.tier.store.quota = Quota(2 * PAGE)
    for number in range(3):
        assert rig.offer(number) and rig.writer.flush(LONG_S)
    assert rig.released == [(number, Outcome.NO_ROOM) for number in range(3)]
    assert len(rig.events) == 1 and "cache.size" in rig.events[0]
    rig.writer.close(LONG_S)


def test_an_idle_writer_sees_what_others_did_and_tells_of_an_unusable_directory(
    tmp_path: Path,
) -> None:
    (tmp_path / "cache").write_text("a file")
    tier = DiskTier(tmp_path / "cache", PLENTY, "model")
    events: list[str] = []
    writer = Writer(tier, SIZE, events.append, refresh_s=0.01)
    assert "cannot be used" in events[0]
    (tmp_path / "cache").unlink()
    other = DiskTier(tmp_path / "cache", PLENTY, "model")
    other.save(key(1), payloads(1))
    deadline = time.monotonic() + LONG_S
    while not tier.contains(key(1)) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert tier.contains(key(1))
    assert writer.close(LONG_S)
    assert events[1:] == ["The cache directory can be used again."]


# --- a thread that fails for other reasons ---


@pytest.mark.parametrize("call", ["write", "allocate", "rename", "open"])
def test_want_of_memory_is_taken_for_a_failing_disk(rig: Rig, call: str) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def out_of_memory(name: str, *arguments: Any) -> None:
        if name == call and not is_count(name, arguments):
            reached.set()
            assert go_on.wait(LONG_S)
            raise MemoryError

    rig.files.before_each = out_of_memory
    assert rig.offer(1) and reached.wait(LONG_S) and rig.offer(2)
    go_on.set()
    assert rig.writer.flush(LONG_S)
    assert rig.released == [(1, Outcome.FAILED), (2, Outcome.FAILED)]
    assert len(rig.events) == 1 and "cannot write" in rig.events[0]
    assert "MemoryError" in rig.events[0]
    rig.files.before_each = lambda name, *arguments: None
    rig.offer_when_it_is_taken(3)
    assert rig.writer.flush(LONG_S)
    assert rig.load(3)
    assert rig.events[1:] == ["The disk cache writes again."]
    assert rig.writer.stats()["queued_bytes"] == 0
    # Nothing is left half-written, nor open: the lock of a living writer would keep it.
    assert not list(rig.directory.glob("*.part"))
    assert not rig.files._opened


def test_a_look_at_the_directory_that_fails_is_one_event_and_not_repeated_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, PLENTY, "model")
    looks: list[int] = []

    def refresh() -> None:
        looks.append(1)
        raise MemoryError

    events: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(tier, "refresh", refresh)
        writer = Writer(tier, 10 * SIZE, events.append, first_pause_s=0.01, refresh_s=0.05)
        time.sleep(0.3)
    assert 1 <= len(looks) <= 7
    assert len(events) == 1 and "MemoryError" in events[0]
    released: list[Outcome] = []
    while not writer.offer(key(1), payloads(1), released.append):
        time.sleep(0.005)
    assert writer.flush(LONG_S)
    assert released == [Outcome.SAVED]
    assert events[1:] == ["The disk cache writes again."]
    assert writer.close(LONG_S)


def test_a_release_that_raises_is_not_the_others_loss(rig: Rig) -> None:
    def broken(outcome: Outcome) -> None:
        raise RuntimeError("a mistake of the owner's")

    with rig.held_at("write"):
        assert rig.writer.offer(key(2), payloads(2), broken)
        assert rig.offer(3)
    assert rig.writer.flush(LONG_S)
    rig.tier.store.clear()
    with rig.held_at("write"):
        assert rig.writer.offer(key(4), payloads(4), broken)
        assert rig.offer(5)
        rig.files.broken["write"] = "EIO"
    assert rig.writer.flush(LONG_S)
    assert [number for number, _ in rig.released] == [1, 3, 1, 5]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_cannot_go_on_says_so_and_leaves_nobody_waiting(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory_even_for_that(error: Exception) -> None:
        raise MemoryError

    with rig.held_at("write"):
        assert rig.offer(2)
        monkeypatch.setattr(rig.writer, "_fail", no_memory_even_for_that)
        rig.files.broken["write"] = "EIO"
    assert rig.writer.flush(LONG_S)
    assert rig.writer.close(LONG_S)
    assert rig.released == [(1, Outcome.CANCELLED), (2, Outcome.CANCELLED)]
    assert rig.events == ["The disk cache keeps nothing more until the model is loaded again."]
    assert not rig.offer(4)


def test_news_that_nobody_takes_do_not_end_the_writer(rig: Rig) -> None:
    def cannot_be_told(event: str) -> None:
        raise MemoryError

    rig.writer._notify = cannot_be_told
    rig.files.broken["write"] = "EIO"
    assert rig.offer(1) and rig.writer.flush(LONG_S)
    rig.files.broken.clear()
    rig.offer_when_it_is_taken(2)
    assert rig.writer.flush(LONG_S)
    assert rig.released == [(1, Outcome.FAILED), (2, Outcome.SAVED)]
