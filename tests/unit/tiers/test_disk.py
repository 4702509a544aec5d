"""One model's blocks on disk: what comes back, what never does, and what must go."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from typing import TYPE_CHECKING

import pytest

from penstock.testing.faulty_files import FaultyFiles, directory_bytes
from penstock.tiers import DiskTier, Outcome, Payload, Quota, Store
from penstock.tiers.files import UPDATE, Files
from penstock.tiers.format import PAGE, block_name, model_digest, part_name
from penstock.tiers.rates import Rate
from penstock.tiers.store import UNLINKS_PER_SAVE
from penstock.tiers.usage import locked

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PLENTY = Quota(1 << 30)
BLOCK = 3 * PAGE  # of `payloads` with its header


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def payloads(number: int) -> list[Payload]:
    return [
        Payload("attention", bytes([number % 251]) * (PAGE + 1)),
        Payload("recurrent", bytes([number % 251 + 1]) * 100),
    ]


def load(tier: DiskTier, number: int) -> bool:
    into = [Payload("attention", bytearray(PAGE + 1)), Payload("recurrent", bytearray(100))]
    hit = tier.load(key(number), into)
    if hit:
        assert [p.data for p in into] == [p.data for p in payloads(number)]
    return hit


def fill(tier: DiskTier, *numbers: int) -> None:
    for number in numbers:
        assert tier.save(key(number), payloads(number)) is Outcome.SAVED


def path_of(directory: Path, number: int, fingerprint: str = "model") -> Path:
    return directory / block_name(model_digest(fingerprint), key(number))


# --- what comes back ---


def test_groups_of_any_kind_and_size_come_back_after_a_restart(tmp_path: Path) -> None:
    groups = [
        ("attention", os.urandom(3_000_001)),
        ("recurrent", os.urandom(70_000)),
        ("window", b""),
        ("recurrent", os.urandom(1)),
    ]
    DiskTier(tmp_path, PLENTY, "model").save(b"k", [Payload(*group) for group in groups])
    tier = DiskTier(tmp_path, PLENTY, "model")
    into = [(kind, bytearray(len(data))) for kind, data in groups]
    assert tier.load(b"k", [Payload(kind, buffer) for kind, buffer in into])
    assert [(kind, bytes(buffer)) for kind, buffer in into] == groups
    assert tier.read_rate.per_s is not None


def test_a_tier_contains_the_blocks_of_its_own_model(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, PLENTY, "model")
    fill(tier, 0, 1, 3)
    assert [number for number in range(5) if tier.contains(key(number))] == [0, 1, 3]
    assert not DiskTier(tmp_path, PLENTY, "other").contains(key(0))


def test_opening_reads_no_block_and_asking_makes_no_call(tmp_path: Path) -> None:
    fill(DiskTier(tmp_path, PLENTY, "model"), *range(20))
    files = FaultyFiles(tmp_path)
    calls: list[str] = []
    files.after_each = calls.append
    tier = DiskTier(tmp_path, PLENTY, "model", files)
    assert calls.count("open") <= 2 and calls.count("list") == 1  # only the record is opened
    calls.clear()
    assert tier.contains(key(7)) and not tier.contains(key(99))
    tier.touch([key(7)])
    assert not load(tier, 99)
    assert not calls


def test_a_file_is_for_its_owner_only_and_a_key_is_only_hex(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "new" / "cache", PLENTY, "../../etc")
    assert tier.save(b"../../../x\0", payloads(1)) is Outcome.SAVED
    directory = tmp_path / "new" / "cache"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(
        ["new", "cache", "usage", block_name(model_digest("../../etc"), b"../../../x\0")]
    )
    with pytest.raises(ValueError, match="64 bytes"):
        tier.contains(b"x" * 65)


# --- what never does ---


def flip(offset: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 4
        path.write_bytes(data)

    return damage


def another_version(path: Path) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 8, 2)
    path.write_bytes(data)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def cut(length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, length)


def taken_from(fingerprint: str, number: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        other = DiskTier(path.parent, PLENTY, fingerprint)
        fill(other, number)
        path_of(path.parent, number, fingerprint).rename(path)

    return damage


BAD = {
    "a bit of the payload": flip(PAGE + 77),
    "a bit of the last payload": flip(-1),
    "a bit of the header": flip(30),
    "a bit of a checksum": flip(157),
    "the magic": flip(0),
    "another version": another_version,
    "cut in the payload": cut(2 * PAGE),
    "cut in the header": cut(20),
    "empty": cut(0),
    "too long": append,
    "of another model": taken_from("other", 1),
    "of another key": taken_from("model", 2),
}


@pytest.mark.parametrize("damage", BAD.values(), ids=BAD)
@pytest.mark.parametrize("by", ["load", "verify"])
def test_a_bad_file_is_a_miss_and_goes(
    tmp_path: Path, damage: Callable[[Path], None], by: str
) -> None:
    tier = DiskTier(tmp_path, PLENTY, "model")
    fill(tier, 1)
    damage(path_of(tmp_path, 1))
    if by == "load":
        assert not load(tier, 1)
        assert tier.counters.bad_removed == 1
    else:
        found = tier.store.verify()
        assert (len(found.bad), found.removed) == (1, 1)
    assert not path_of(tmp_path, 1).exists()
    assert not tier.contains(key(1))
    fill(tier, 1)
    assert load(tier, 1)


def test_other_shapes_are_a_miss(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, PLENTY, "model")
    fill(tier, 1)
    kinds = [Payload("recurrent", bytearray(PAGE + 1)), Payload("attention", bytearray(100))]
    assert not tier.load(key(1), kinds)


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    tier = DiskTier(directory, PLENTY, "model")
    fill(tier, 1, 2)
    precious = tmp_path / "precious"
    path_of(directory, 1).rename(precious)
    path_of(directory, 1).symlink_to(precious)
    path_of(directory, 2).unlink()
    os.mkfifo(path_of(directory, 2))
    assert not load(tier, 1) and not load(tier, 2)
    tier.store.clear()
    assert precious.exists()
    assert not DiskTier(directory, PLENTY, "model").contains(key(1))


def test_a_read_error_is_a_miss_and_the_file_stays(tmp_path: Path) -> None:
    files = FaultyFiles(tmp_path)
    tier = DiskTier(tmp_path, PLENTY, "model", files)
    fill(tier, 1)
    files.broken["read"] = "EIO"
    assert not load(tier, 1)
    assert tier.counters.read_errors == 1
    assert not tier.contains(key(1))
    files.broken.clear()
    tier.store._stale = True
    tier.refresh()
    assert load(tier, 1)


# --- the quota ---


def test_one_quota_over_all_models_counts_every_file(tmp_path: Path) -> None:
    quota = Quota(20 * PAGE)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "rubbish").write_bytes(b"x" * 5 * PAGE)
    first = DiskTier(tmp_path, quota, "first")
    fill(first, *range(4))  # 12 pages, the record and the rubbish: 18
    for model in ("second", "third"):
        tier = DiskTier(tmp_path, quota, model)
        fill(tier, *range(3))
        assert all(load(tier, number) for number in range(3))
        assert directory_bytes(tmp_path) <= 20 * PAGE
    assert not load(first, 0)
    assert (tmp_path / "deep" / "er" / "rubbish").exists()
    summary = Store(tmp_path, quota).summary()
    assert summary.held_bytes == directory_bytes(tmp_path)
    assert (summary.other_files, len(summary.models)) == (1, 2)


def test_files_that_are_not_ours_can_fill_the_quota_but_are_never_removed(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, Quota(4 * PAGE), "model")
    (tmp_path / "letter.txt").write_bytes(b"x" * 3 * PAGE)
    (tmp_path / "0123.kv").write_bytes(b"")
    assert tier.save(key(1), payloads(1)) is Outcome.NO_ROOM
    tier.store.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0123.kv", "letter.txt", "usage"]


def test_the_share_of_the_free_disk_counts_what_we_hold(tmp_path: Path) -> None:
    files = FaultyFiles(tmp_path, capacity_bytes=20 * PAGE)
    tier = DiskTier(tmp_path, Quota(None, share=0.5), "model", files)
    fill(tier, 1, 2, 3)
    assert tier.store.quota_bytes == 10 * PAGE
    assert tier.save(key(4), payloads(4)) is Outcome.SAVED
    assert tier.store.evictions == 1
    assert Quota.parse("10%") == Quota.parse("auto") == Quota(None, 0.1)
    assert Quota.parse("0").off and not Quota.parse("4096").off


def test_the_least_recently_used_goes_whichever_process_used_it(tmp_path: Path) -> None:
    quota = Quota(10 * PAGE)
    tier, other = DiskTier(tmp_path, quota, "model"), DiskTier(tmp_path, quota, "model")
    fill(tier, 0, 1, 2)
    other.store._stale = True
    other.refresh()
    assert load(other, 0)
    other.refresh()  # marks the file
    fill(tier, 3)
    assert [path_of(tmp_path, number).exists() for number in range(4)] == [True, False, True, True]


def test_the_end_of_a_chain_goes_before_its_beginning(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, Quota(10 * PAGE), "model")
    fill(tier, 0, 1, 2)
    tier.touch([key(0), key(1), key(2)])
    tier.refresh()
    restarted = DiskTier(tmp_path, Quota(10 * PAGE), "model")
    fill(restarted, 3)
    assert [path_of(tmp_path, number).exists() for number in range(4)] == [True, True, False, True]


def test_unlinks_per_save_are_bounded_and_opening_comes_down_to_the_quota(tmp_path: Path) -> None:
    count = 3 * UNLINKS_PER_SAVE
    files = FaultyFiles(tmp_path)
    tier = DiskTier(tmp_path, PLENTY, "model", files)
    fill(tier, *range(count))
    tier.store.quota = Quota((1 + BLOCK // PAGE * count // 2) * PAGE)  # half of them must go
    calls: list[str] = []
    files.after_each = calls.append
    assert tier.save(key(count), payloads(0)) is Outcome.NO_ROOM
    assert calls.count("unlink") == UNLINKS_PER_SAVE
    assert tier.save(key(count), payloads(0)) is Outcome.SAVED
    small = Quota(10 * PAGE)
    DiskTier(tmp_path, small, "model")
    assert directory_bytes(tmp_path) == 10 * PAGE


def test_a_file_that_cannot_be_removed_does_not_stop_the_others(tmp_path: Path) -> None:
    files = FaultyFiles(tmp_path)
    tier = DiskTier(tmp_path, Quota(10 * PAGE), "model", files)
    fill(tier, 0, 1, 2)
    real = os.unlink

    def unlink(path: str) -> None:
        if path.endswith(path_of(tmp_path, 0).name):
            raise PermissionError(1, "not this one")
        real(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.unlink", unlink)
        fill(tier, 3)
    assert path_of(tmp_path, 0).exists() and not path_of(tmp_path, 1).exists()


def test_files_of_living_writers_stay_and_those_of_dead_ones_go(tmp_path: Path) -> None:
    DiskTier(tmp_path, PLENTY, "model")
    name = block_name(model_digest("model"), key(1))
    dead, living = tmp_path / part_name(name), tmp_path / part_name(name)
    dead.write_bytes(b"x" * PAGE)
    living.write_bytes(b"x" * PAGE)
    with living.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        tier = DiskTier(tmp_path, PLENTY, "model")
        assert not dead.exists() and living.exists()
        assert tier.store.held_bytes == directory_bytes(tmp_path)
    tier.store._stale = True
    tier.refresh()
    assert not living.exists()


def test_two_processes_that_save_the_same_block_count_it_once(tmp_path: Path) -> None:
    tier, other = DiskTier(tmp_path, PLENTY, "model"), DiskTier(tmp_path, PLENTY, "model")

    def meanwhile() -> bool:
        return other.save(key(1), payloads(1)) in (Outcome.SAVED, Outcome.PRESENT)

    assert tier.save(key(1), payloads(1), wanted=meanwhile) is Outcome.PRESENT
    assert tier.store.held_bytes == directory_bytes(tmp_path) == 4 * PAGE
    assert load(tier, 1)


def test_a_record_removed_while_another_waits_for_its_lock(tmp_path: Path) -> None:
    record, files = tmp_path / "usage", Files(tmp_path)
    record.touch()
    others_could_lock: list[bool] = []

    def take() -> None:
        with locked(files):
            descriptor = files.open("usage", UPDATE)
            others_could_lock.append(files.try_lock(descriptor))
            files.close(descriptor)

    taking = threading.Thread(target=take)
    with record.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        taking.start()
        time.sleep(0.05)  # it waits by now, or will find the new file
        record.unlink()
    taking.join()
    assert others_could_lock == [False]


# --- the whole directory ---


def test_clear_reports_and_removes_what_is_ours_of_every_model(tmp_path: Path) -> None:
    for model in ("first", "second"):
        fill(DiskTier(tmp_path, PLENTY, model), *range(300))
    steps: list[tuple[int, int]] = []
    files, size = Store(tmp_path, PLENTY).clear(lambda done, total: steps.append((done, total)))
    assert (files, size) == (600, 600 * (2 * PAGE + 101))
    assert steps[-1] == (600, 600) and len(steps) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["usage"]


def test_a_clear_cancels_what_was_offered_before_it(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, PLENTY, "model")
    offered_ns = time.time_ns()
    Store(tmp_path, PLENTY).clear()
    assert tier.save(key(1), payloads(1), offered_ns=offered_ns) is Outcome.CANCELLED
    assert tier.save(key(1), payloads(1)) is Outcome.SAVED


def test_a_clock_that_was_set_back_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, PLENTY, "model")
    now = time.time_ns()
    tier.store.clear()
    monkeypatch.setattr("time.time_ns", lambda: now - 10**12)
    assert tier.save(key(1), payloads(1)) is Outcome.SAVED


def test_an_unusable_directory_is_told_and_tried_again(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    tier = DiskTier(tmp_path / "cache", PLENTY, "model")
    assert tier.problem is not None and "cannot be used" in tier.problem
    assert not load(tier, 1)
    (tmp_path / "cache").unlink()
    tier.refresh()
    assert tier.problem is None
    fill(tier, 1)


def test_a_directory_that_cannot_be_written_to_serves_hits(tmp_path: Path) -> None:
    fill(DiskTier(tmp_path, PLENTY, "model"), 1)

    class ReadOnly(FaultyFiles):
        def open(self, name: str, flags: int) -> int:
            if flags & os.O_RDWR:
                raise OSError(30, "Read-only file system")
            return super().open(name, flags)

    tier = DiskTier(tmp_path, PLENTY, "model", ReadOnly(tmp_path))
    assert tier.problem is not None and "Read-only" in tier.problem
    assert load(tier, 1)
    with pytest.raises(OSError, match="Read-only"):
        tier.save(key(2), payloads(2))


def test_the_rate_is_that_of_late() -> None:
    rate = Rate(half_life=100)
    assert rate.per_s is None
    rate.add(1000, 1.0)
    assert rate.per_s == pytest.approx(1000)
    for _ in range(10):
        rate.add(100, 1.0)
    assert rate.per_s == pytest.approx(100, rel=0.01)
