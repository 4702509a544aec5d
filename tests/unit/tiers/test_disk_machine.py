"""The disk tier under every fault: three processes' worth of tiers over one directory.

Two share a model, one has another. Any system call may fail, write half or be the last one of its
process; files are damaged, swapped and removed from outside; other programs leave theirs. After
every single call the quota holds; after every rule no payload has been wrong and the count is not
too low; without faults it equals the directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import struct
import tempfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from penstock.testing.faulty_files import (
    CRASH,
    ERRORS,
    SHORT,
    Crash,
    Fault,
    FaultyFiles,
    directory_bytes,
)
from penstock.tiers import DiskTier, Outcome, Payload, Quota
from penstock.tiers.format import PAGE, block_name, model_digest, tag_of

LIMIT = 24 * PAGE
CAPACITY = 400 * PAGE
KEYS = 12
MODELS = ("one", "two", "one")  # of each tier


def key_of(number: int) -> bytes:
    return bytes([number]) * 16


def content(model: str, number: int) -> list[tuple[str, bytes]]:
    """What the block must contain: attention, and the state of a recurrent group beside it."""
    source = random.Random(f"{model} {number}")
    return [
        ("attention", source.randbytes(1000 + 700 * number)),
        ("recurrent", source.randbytes(900)),
    ]


def payloads_of(model: str, number: int) -> list[Payload]:
    return [Payload(kind, data) for kind, data in content(model, number)]


def load(tier: DiskTier, model: str, number: int) -> bool:
    """A load; a hit must be exactly what belongs there."""
    expected = content(model, number)
    buffers = [(kind, bytearray(len(data))) for kind, data in expected]
    hit = tier.load(key_of(number), [Payload(kind, buffer) for kind, buffer in buffers])
    if hit:
        assert [(kind, bytes(buffer)) for kind, buffer in buffers] == expected
    return hit


def recorded_bytes(directory: Path, mark: int | None = None) -> int | None:
    """The count in the record, None if the directory's mark says that it must be taken anew."""
    try:
        record = (directory / "usage").read_bytes()
    except FileNotFoundError:
        return None
    if len(record) != 36 or struct.unpack("<I", record[32:])[0] != zlib.crc32(record[:32]):
        return None
    held, recorded_mark = struct.unpack_from("<Qq", record, 8)
    actual_mark = directory.stat().st_mtime_ns if mark is None else mark
    return int(held) if recorded_mark == actual_mark else None


faults = st.none() | st.builds(Fault, st.sampled_from([CRASH, SHORT, *ERRORS]), st.integers(0, 45))
tiers = st.integers(0, len(MODELS) - 1)
numbers = st.integers(0, KEYS - 1)


@pytest.fixture(autouse=True)
def file_pages_leave_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that faults strike those calls of a few saves, too."""
    monkeypatch.setattr("penstock.tiers.pages._FILES_BEHIND", 0)


class Directory(RuleBasedStateMachine):
    struck: ClassVar[set[tuple[str, str]]] = set()
    rules_run: ClassVar[int] = 0

    @initialize(by_share=st.booleans())
    def open(self, by_share: bool) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tier-")) / "cache"
        # Both give the same number of bytes.
        self.quota = Quota(None, LIMIT / CAPACITY) if by_share else Quota(LIMIT)
        self.exact = True  # no fault and nobody else since the last count
        self.marks = 1
        self.tiers = [self.new_tier(model) for model in MODELS]

    def new_tier(self, model: str) -> DiskTier:
        files = FaultyFiles(self.directory, CAPACITY)
        files.after_each = partial(check_quota, self.directory)
        return DiskTier(self.directory, self.quota, model, files, frugal=True)

    def act(self, which: int, fault: Fault | None, name: str, *arguments: Any) -> Any:
        """Call a method of a tier, which may be struck; None if it has not ended well."""
        Directory.rules_run += 1
        tier = self.tiers[which]
        files = tier.store.files
        assert isinstance(files, FaultyFiles)
        if fault:
            # A fault object is shared between shrinking runs of a test.
            files.fault = Fault(fault.kind, fault.after)
        try:
            method = load if name == "load" else getattr(tier, name, None)
            if name == "load":
                return load(tier, MODELS[which], *arguments)
            return (method or getattr(tier.store, name))(*arguments)
        except OSError as error:
            assert error.errno != errno.ENOENT, "something was not expected to be missing"
        except Crash:
            self.tiers[which] = self.new_tier(MODELS[which])
        finally:
            if files.fault and files.fault.struck:
                self.exact = False
                Directory.struck.add((files.fault.kind, files.fault.struck))
            files.fault = None
        return None

    def changed_outside(self) -> None:
        """What another program does shows in the directory's time, once the clock has ticked."""
        self.exact = False
        if self.directory.exists():
            self.marks += 1
            os.utime(self.directory, ns=(self.marks, self.marks))

    def blocks(self) -> list[Path]:
        return sorted(self.directory.glob("[0-9a-f]*-*.kv"))

    @rule(which=tiers, number=numbers, fault=faults)
    def save(self, which: int, number: int, fault: Fault | None) -> None:
        model = MODELS[which]
        outcome = self.act(which, fault, "save", key_of(number), payloads_of(model, number))
        if fault is None:
            assert outcome in (Outcome.SAVED, Outcome.PRESENT, Outcome.NO_ROOM)
        if outcome is Outcome.SAVED:
            assert load(self.tiers[which], model, number), "what was just saved is not there"

    @rule(which=tiers, number=numbers, fault=faults)
    def load(self, which: int, number: int, fault: Fault | None) -> None:
        self.act(which, fault, "load", number)

    @rule(which=tiers, fault=faults)
    def refresh(self, which: int, fault: Fault | None) -> None:
        self.tiers[which].store._stale = True
        self.act(which, fault, "refresh")
        if fault is None:
            self.exact = True
            blocks = self.blocks()
            index = self.tiers[which].store.index
            assert len(index) == len(blocks)
            assert all(tag_of(path.name) in index for path in blocks)
            totals = [index.totals(model_digest(model)) for model in set(MODELS)]
            assert sum(total.files for total in totals) == len(blocks)
            assert sum(total.bytes for total in totals) == sum(p.stat().st_size for p in blocks)

    @rule(which=tiers, fault=faults)
    def clear(self, which: int, fault: Fault | None) -> None:
        cleared = self.act(which, fault, "clear")
        if cleared is not None:
            assert not self.blocks()

    @rule(which=tiers, fault=faults)
    def verify(self, which: int, fault: Fault | None) -> None:
        verified = self.act(which, fault, "verify")
        if fault is None:
            assert verified is not None and verified.files == len(self.blocks())

    @rule(which=tiers, chain=st.lists(numbers, max_size=4))
    def touch(self, which: int, chain: list[int]) -> None:
        self.tiers[which].touch([key_of(number) for number in chain])

    @rule(which=tiers)
    def restart(self, which: int) -> None:
        files = self.tiers[which].store.files
        assert isinstance(files, FaultyFiles)
        files.crash()
        self.tiers[which] = self.new_tier(MODELS[which])

    @rule(pick=st.integers(0, 99), how=st.sampled_from(["flip", "cut", "empty", "swap", "remove"]))
    def damage(self, pick: int, how: str) -> None:
        blocks = self.blocks()
        if not blocks:
            return
        victim = blocks[pick % len(blocks)]
        data = bytearray(victim.read_bytes())
        self.exact = False
        if how == "flip" and data:
            data[(pick * 997) % len(data)] ^= 1 << (pick % 8)
            victim.write_bytes(data)
        elif how == "cut":
            os.truncate(victim, len(data) * pick // 100)
        elif how == "empty":
            os.truncate(victim, 0)
        elif how == "swap":
            victim.rename(blocks[(pick + 1) % len(blocks)])
            self.changed_outside()
        else:
            victim.unlink()
            self.changed_outside()

    @rule(pages=st.integers(0, 6), name=st.sampled_from(["rubbish", "x.part", "-.kv"]))
    def other_program(self, pages: int, name: str) -> None:
        if (
            self.directory.exists()
            and directory_bytes(self.directory) + (pages + 1) * PAGE <= LIMIT
        ):
            (self.directory / name).write_bytes(b"x" * pages * PAGE)
            self.changed_outside()

    @rule(what=st.sampled_from(["usage", "all"]))
    def vanish(self, what: str) -> None:
        if what == "usage":
            (self.directory / "usage").unlink(missing_ok=True)
        else:
            shutil.rmtree(self.directory, ignore_errors=True)
        self.changed_outside()

    @invariant()
    def the_count_is_not_too_low(self) -> None:
        check_quota(self.directory, "a rule")
        recorded = recorded_bytes(self.directory)
        if recorded is None:
            assert not self.exact, "there is no count"
            return
        actual = directory_bytes(self.directory)
        assert recorded >= actual
        if self.exact:
            assert recorded == actual

    def teardown(self) -> None:
        for tier in getattr(self, "tiers", []):
            tier.store.files.crash()
        shutil.rmtree(self.directory.parent, ignore_errors=True)


def run_machine(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Directory,
        settings=settings(max_examples=examples, stateful_step_count=steps),
    )


def test_no_fault_gives_a_wrong_payload_or_too_many_bytes() -> None:
    run_machine(60, 40)


@pytest.mark.proof
def test_no_fault_gives_a_wrong_payload_or_too_many_bytes_long() -> None:
    run_machine(2000, 60)
    print(f"\n{Directory.rules_run} rules, faults struck: {sorted(Directory.struck)}")  # noqa: T201


# --- every call of one save, one clear, one refresh, each struck once by everything ---

ACTS: dict[str, Any] = {
    "save": lambda tier: tier.save(key_of(9), payloads_of("one", 9)),
    "clear": lambda tier: tier.store.clear(),
    "refresh": lambda tier: tier.refresh(),
    "load": lambda tier: load(tier, "one", 2),
    "load damaged": lambda tier: load(tier, "one", 5),
}


def check_quota(directory: Path, call: str) -> None:
    assert directory_bytes(directory) <= LIMIT, f"over the quota after {call}"


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize("kind", [CRASH, SHORT, "ENOSPC", "EIO"])
def test_a_fault_at_each_call(tmp_path: Path, name: str, kind: str) -> None:
    struck = []
    for after in range(200):
        directory = tmp_path / str(after)
        setting_up = DiskTier(directory, Quota(LIMIT), "one", FaultyFiles(directory, CAPACITY))
        for number in range(7):
            assert setting_up.save(key_of(number), payloads_of("one", number)) is Outcome.SAVED
        damaged = directory / block_name(model_digest("one"), key_of(5))
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
        files = FaultyFiles(directory, CAPACITY)
        tier = DiskTier(directory, Quota(LIMIT), "one", files, frugal=True)
        tier.store._stale = True
        files.after_each = partial(check_quota, directory)
        fault = files.fault = Fault(kind, after)
        with contextlib.suppress(OSError, Crash):
            ACTS[name](tier)
        files.fault = None
        if fault.struck is None:
            break
        struck.append(fault.struck)
        recorded = recorded_bytes(directory)
        assert recorded is None or recorded >= directory_bytes(directory)
        # Another process finds all in order: nothing wrong is served, and it can go on at once.
        other = DiskTier(directory, Quota(LIMIT), "one", FaultyFiles(directory, CAPACITY))
        assert recorded_bytes(directory) == directory_bytes(directory)
        assert not list(directory.glob("*.part")) or kind != CRASH
        for number in range(10):
            load(other, "one", number)
        assert other.save(key_of(11), payloads_of("one", 11)) is Outcome.SAVED
        assert load(other, "one", 11)
        files.crash()
    else:
        raise AssertionError("the act makes more calls than were tried")
    assert len(struck) > 3


@pytest.mark.parametrize("name", ["save", "clear", "load damaged"])
@pytest.mark.parametrize("kind", [CRASH, "EIO"])
def test_a_fault_within_one_tick_of_the_clock_leaves_no_count_that_is_too_low(
    tmp_path: Path, name: str, kind: str
) -> None:
    for after in range(200):
        directory = tmp_path / str(after)
        files = FaultyFiles(directory, CAPACITY)
        files.clock_ticks = False
        tier = DiskTier(directory, Quota(LIMIT), "one", files)
        for number in range(7):
            tier.save(key_of(number), payloads_of("one", number))
        os.truncate(directory / block_name(model_digest("one"), key_of(5)), 1)
        fault = files.fault = Fault(kind, after)
        with contextlib.suppress(OSError, Crash):
            ACTS[name](tier)
        recorded = recorded_bytes(directory, mark=0)
        assert recorded is not None and recorded >= directory_bytes(directory)
        files.crash()
        if fault.struck is None:
            return
    raise AssertionError("the act makes more calls than were tried")
