"""Threads that read KV from the disk: what ends them is told, and nobody waits for them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from penstock.catalog.kv_formats import kv_format
from penstock.memory.readings.gauge import GroupReading, RamReading
from penstock.tiers import DiskTier, Payload, Quota
from penstock.worker.backends.cpu import CpuBackend
from penstock.worker.kv.arena import Arena, BlockLayout, LayerGeometry
from penstock.worker.kv.groups import LayerGroup
from penstock.worker.kv.identity import ModelFiles
from penstock.worker.kv.offload import disk_reader
from penstock.worker.kv.offload.disk_reader import DiskReader, DiskSpec, FetchRequest
from penstock.worker.kv.offload.tiers import KvOffload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEY = b"k" * 16
LONG_S = 20.0


class Rig:
    """A reader, and what it has told."""

    def __init__(self, directory: Path) -> None:
        model = directory / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        files = ModelFiles.now(model, with_code=False)
        digests = directory / "digests.json"
        self.spec = DiskSpec(directory / "kv", Quota(1 << 30), files, digests, "float32", "m")
        self.told: list[str] = []
        self.opened: list[DiskTier] = []
        self.buffer = bytearray(100)
        self.reader = DiskReader(self.spec, [self.payload], self.opened.append, self.told.append)

    def payload(self, buffer: int) -> list[Payload]:
        return [Payload("attention", self.buffer)]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(disk_reader, "reader_threads", lambda: 3)
    return Rig(tmp_path)


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: Any, **named: Any) -> Any:
        raise error

    return fail


def start_of_thread(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That thread of the reader's does not start, as where a process may have no more of them."""
    start, started = threading.Thread.start, iter(range(10))

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("kv-reader") and next(started) == number:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


def no_memory_for_the_digest(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelFiles, "digest", raising(MemoryError()))


def no_memory_for_the_listing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tiers.store.Store.refresh", raising(MemoryError()))


def no_thread_for_the_writer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.reader._opened = raising(RuntimeError("can't start new thread"))


def no_first_thread(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    start_of_thread(0, monkeypatch)


def no_second_thread(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    start_of_thread(1, monkeypatch)


@pytest.mark.parametrize(
    "breaks",
    [
        no_memory_for_the_digest,
        no_memory_for_the_listing,
        no_thread_for_the_writer,
        no_first_thread,
        no_second_thread,
    ],
)
def test_what_cannot_be_opened_is_told_and_not_used(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    breaks: Callable[[Rig, pytest.MonkeyPatch], None],
) -> None:
    breaks(rig, monkeypatch)
    rig.reader.start()
    until(lambda: rig.told)
    assert rig.reader.failed
    assert rig.reader.tier is None
    reason = "can't start new thread" if "thread" in breaks.__name__ else "MemoryError"
    assert rig.told == [f"KV of m is not kept on disk: {reason}"]


@pytest.mark.parametrize(
    ("limits", "frugal"),
    [((), False), ((1 << 41,), False), ((1 << 36,), False), ((1 << 41, 1 << 30), True)],
)
def test_file_pages_are_spared_where_a_group_has_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, ...], frugal: bool
) -> None:
    groups = tuple(GroupReading(limit, 0) for limit in limits)
    reading = RamReading(1 << 40, 1 << 40, groups)
    monkeypatch.setattr(disk_reader, "read_ram", lambda: reading)
    rig = Rig(tmp_path)
    # What the worker draws around itself after that is no shortage.
    monkeypatch.setattr(disk_reader, "read_ram", raising(AssertionError()))
    rig.reader.start()
    until(lambda: rig.reader.tier)
    assert rig.opened[0]._pages.frugal == frugal


def test_a_tier_is_not_seen_before_it_can_be_written_to(rig: Rig) -> None:
    seen: list[DiskTier | None] = []
    rig.reader._opened = lambda tier: seen.append(rig.reader.tier)
    rig.reader.start()
    until(lambda: rig.reader.tier)
    assert seen == [None]
    assert not rig.told


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("a mistake")])
def test_a_block_without_memory_is_a_miss_and_a_mistake_is_the_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    rig.reader.start()
    until(lambda: rig.reader.tier)
    monkeypatch.setattr(DiskTier, "load", raising(error))
    (reads,) = rig.reader.groups
    reads.buffers.put(0)
    reads.ask(FetchRequest(1, [KEY], [1], None, 0.0, end=1), 0)
    if isinstance(error, MemoryError):
        until(lambda: reads.arrived)
        assert reads.arrived[0][2] is None
        assert not rig.reader.failed and not rig.told
    else:
        until(lambda: rig.told)
        assert rig.reader.failed and rig.reader.tier is None
        assert rig.told == ["KV of m is not kept on disk: a mistake"]


def test_nothing_is_left_to_do_for_a_disk_that_will_not_be_used(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an idle engine would be woken a hundred times a second to look again."""
    no_memory_for_the_digest(rig, monkeypatch)
    layout = BlockLayout((LayerGeometry(2, 64, 64),) * 2, 16, kv_format("auto", "float32"))
    arena = Arena(layout, 64, CpuBackend(), 1 << 20)
    group = LayerGroup((0, 1), None, layout.token_bytes, 16)
    tier = KvOffload([group], [arena], rig.spec, 1 << 30)
    tier.keep(0, KEY)
    assert tier.offer(lambda *_: 1), "the disk may still come"
    tier.start()
    until(lambda: not tier.offer(lambda *_: 1))
    until(lambda: tier._notices)
    assert tier.notices() == ["KV of m is not kept on disk: MemoryError"]
    arena.close()
