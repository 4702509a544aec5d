"""KV between the arena and the disk: what was saved comes back to its place, or not at all."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from penstock.tiers import DiskTier, Quota, Store
from penstock.worker.kv import disk_reader, restoring, trays
from penstock.worker.kv import shelf as shelf_module
from penstock.worker.kv.arena import Arena, BlockLayout, LayerGeometry
from penstock.worker.kv.disk_reader import ShelfSpec
from penstock.worker.kv.identity import ModelFiles
from penstock.worker.kv.shelf import Shelf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from penstock.tiers import Payload

KEYS = [bytes([n]) * 16 for n in range(12)]
LAYOUT = BlockLayout((LayerGeometry(2, 64, 64),) * 2, 16, torch.float32)


class Receiver:
    """Wants blocks from `first` on; notes what it is told."""

    def __init__(self, first: int) -> None:
        self.first: int | None = first
        self.told: list[tuple[int, bool]] = []

    def place(self, ticket: int, index: int) -> int | None:
        return None if self.first is None else self.first + index

    def arrived(self, ticket: int, *, more: bool) -> None:
        self.told.append((ticket, more))


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(LAYOUT, 64, torch.device("cpu"), 1 << 20)
    for extent in range(-(-64 // made.extent_blocks)):
        made.commit(extent)
    yield made
    made.close()


@pytest.fixture
def spec(tmp_path: Path) -> ShelfSpec:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    quota = Quota.parse(str(1 << 30))
    files = ModelFiles.now(model, with_code=False)
    return ShelfSpec(tmp_path / "kv", quota, files, tmp_path / "digests.json", "float32", "m")


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def opened(arena: Arena, spec: ShelfSpec) -> Shelf:
    made = Shelf(arena, spec, 1 << 30)
    made.start()
    until(lambda: "saved" in made.stats())
    return made


def fill(arena: Arena, first: int, count: int) -> None:
    for block in range(first, first + count):
        arena.bytes_of(block).copy_(torch.randint(0, 255, (LAYOUT.block_bytes,), dtype=torch.uint8))


def save_all(shelf: Shelf, first: int) -> None:
    """The block of KEYS[n] is `first` + n."""
    for key in KEYS:
        shelf.keep(key)
    until(lambda: not shelf.offer(lambda key: first + key[0]))
    until(lambda: shelf.stats()["saved"] == len(KEYS))


def fetch_all(shelf: Shelf, receiver: Receiver, keys: list[bytes]) -> None:
    shelf.fetch(keys)

    def ended() -> bool:
        shelf.deliver(receiver)
        return bool(receiver.told) and not receiver.told[-1][1]

    until(ended)


def test_what_was_saved_comes_back_to_its_place(arena: Arena, spec: ShelfSpec) -> None:
    fill(arena, 1, len(KEYS))
    first = opened(arena, spec)
    save_all(first, 1)
    first.close(lambda _: None)

    again = opened(arena, spec)  # another worker, after a restart
    assert again.covers([*KEYS, b"x" * 16]) == len(KEYS)
    assert again.covers([b"x" * 16, *KEYS]) == 0
    receiver = Receiver(40)
    fetch_all(again, receiver, KEYS)
    assert [more for _, more in receiver.told] == [True] * len(KEYS) + [False]
    for n in range(len(KEYS)):
        assert torch.equal(arena.bytes_of(1 + n), arena.bytes_of(40 + n))


def test_other_weights_find_nothing(arena: Arena, spec: ShelfSpec) -> None:
    shelf = opened(arena, spec)
    save_all(shelf, 1)
    shelf.close(lambda _: None)
    folder = spec.files.folder
    (folder / "config.json").write_text('{"changed": true}')
    spec = replace(spec, files=ModelFiles.now(folder, with_code=False))
    assert opened(arena, spec).covers(KEYS) == 0


def test_files_that_changed_since_the_load_are_not_the_loaded_ones(
    arena: Arena, spec: ShelfSpec
) -> None:
    (spec.files.folder / "config.json").write_text('{"changed": true}')
    shelf = Shelf(arena, spec, 1 << 30)
    shelf.start()
    until(lambda: shelf._notices)
    assert shelf.notices() == [
        "KV of m is not kept on disk: its files have changed since it was loaded"
    ]
    assert not spec.directory.exists()
    shelf.keep(KEYS[0])
    assert not shelf.offer(lambda _: 1)  # nothing that would be saved one day


def test_a_damaged_block_ends_the_errand(arena: Arena, spec: ShelfSpec) -> None:
    fill(arena, 1, len(KEYS))
    shelf = opened(arena, spec)
    save_all(shelf, 1)
    victim = next(spec.directory.rglob(f"*{KEYS[5].hex()}*"))
    content = bytearray(victim.read_bytes())
    content[-7] ^= 1
    victim.write_bytes(content)
    receiver = Receiver(40)
    shelf = opened(arena, spec)  # whose trays are empty
    fetch_all(shelf, receiver, KEYS)
    assert [more for _, more in receiver.told] == [True] * 5 + [False]
    assert shelf.covers(KEYS) == 5
    assert shelf.stats()["bad_removed"] == 1


def test_what_is_dropped_is_put_nowhere_and_blocks_nobody(arena: Arena, spec: ShelfSpec) -> None:
    fill(arena, 1, len(KEYS))
    shelf = opened(arena, spec)
    save_all(shelf, 1)
    shelf = opened(arena, spec)
    before = arena.bytes_of(40).clone()
    for _ in range(300):  # more than there are trays, if one were lost each time
        shelf.drop(shelf.fetch(KEYS))
    receiver = Receiver(50)
    fetch_all(shelf, receiver, KEYS[:3])
    assert [more for _, more in receiver.told] == [True] * 3 + [False]
    assert torch.equal(arena.bytes_of(40), before)
    nobody = Receiver(40)
    nobody.first = None  # it ended while its blocks were being read
    for _ in range(300):
        shelf.fetch(KEYS)
        shelf.deliver(nobody)
    assert torch.equal(arena.bytes_of(40), before)
    assert not nobody.told
    fetch_all(shelf, Receiver(50), KEYS)


def test_a_disk_that_hangs_is_not_waited_for(
    arena: Arena, spec: ShelfSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(opened(arena, spec), 1)
    shelf = opened(arena, spec)
    answers = threading.Event()
    load = DiskTier.load

    def hanging(tier: DiskTier, key: bytes, into: Sequence[Payload]) -> bool:
        return answers.wait(20) and load(tier, key, into)

    monkeypatch.setattr(DiskTier, "load", hanging)
    monkeypatch.setattr(restoring, "PATIENCE_S", 0.05)
    receiver = Receiver(40)
    fetch_all(shelf, receiver, KEYS)
    assert receiver.told == [(1, False)]
    assert shelf.covers(KEYS) == 0  # until it answers
    answers.set()

    def answered() -> bool:
        shelf.deliver(receiver)
        return shelf.covers(KEYS) == len(KEYS)

    until(answered)
    assert receiver.told == [(1, False)]


def test_what_is_sooner_computed_is_not_read(
    arena: Arena, spec: ShelfSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(opened(arena, spec), 1)
    shelf = opened(arena, spec)
    fetch_all(shelf, Receiver(40), KEYS[:6])  # now the disk's rate is known
    shelf.computed(tokens=16, seconds=10.0)
    assert shelf.covers(KEYS) == len(KEYS)
    for _ in range(60):
        shelf.computed(tokens=1 << 20, seconds=1e-6)
    assert shelf.covers(KEYS[6:]) == 0
    monkeypatch.setattr(shelf_module, "TRY_AGAIN_S", 0.0)  # the disk may have been busy then
    assert shelf.covers(KEYS[6:]) == 6


def test_a_block_that_was_given_up_before_its_turn_is_not_saved(
    arena: Arena, spec: ShelfSpec
) -> None:
    shelf = opened(arena, spec)
    shelf.keep(KEYS[0])
    assert not shelf.offer(lambda _: None)
    shelf.close(lambda _: None)
    assert shelf.stats()["accepted"] == 0


@pytest.fixture
def roomy(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """Without a disk, for a tier in RAM of many pieces."""
    monkeypatch.setattr(trays, "EXTENT_BYTES", 8 * LAYOUT.block_bytes)
    made = Shelf(arena, None, 1 << 20, most_tier_bytes=64 * LAYOUT.block_bytes)
    made.start()
    return made


def kept(shelf: Shelf) -> int:
    return shelf.covers(KEYS)


def test_blocks_come_back_from_ram_without_a_disk(arena: Arena, roomy: Shelf) -> None:
    fill(arena, 1, len(KEYS))
    for key in KEYS:
        roomy.keep(key)
    assert not roomy.offer(lambda key: 1 + key[0]), "nothing was granted"
    assert kept(roomy) == 0
    roomy.grant(64 * LAYOUT.block_bytes)
    until(lambda: not roomy.offer(lambda key: 1 + key[0]))
    assert kept(roomy) == len(KEYS)
    receiver = Receiver(40)
    fetch_all(roomy, receiver, KEYS)
    for n in range(len(KEYS)):
        assert torch.equal(arena.bytes_of(1 + n), arena.bytes_of(40 + n))
    assert roomy.stats()["ram_hits"] == len(KEYS)


def test_ram_that_is_taken_back_is_given_back(arena: Arena, roomy: Shelf) -> None:
    roomy.grant(64 * LAYOUT.block_bytes)
    for number in range(60):
        roomy.keep(bytes([number]) * 16)
        roomy.offer(lambda key: 1 + key[0])
    held = roomy.stats()["ram_held_bytes"]
    assert 0 < held <= roomy.tier_bytes <= 64 * LAYOUT.block_bytes
    roomy.grant(int(held) // 2)
    assert roomy.stats()["ram_held_bytes"] <= roomy.tier_bytes <= held // 2
    roomy.grant(0)
    assert roomy.stats()["ram_held_bytes"] == roomy.tier_bytes == 0
    # What is left in the first trays is whole.
    left = [key for key in (bytes([n]) * 16 for n in range(60)) if roomy.covers([key])]
    for key in left:
        receiver = Receiver(62)
        fetch_all(roomy, receiver, [key])
        assert torch.equal(arena.bytes_of(62), arena.bytes_of(1 + key[0]))


def test_a_tray_that_is_wanted_is_not_given_to_another(arena: Arena, roomy: Shelf) -> None:
    roomy.grant(64 * LAYOUT.block_bytes)
    fill(arena, 1, 60)
    for key in KEYS:
        roomy.keep(key)
    until(lambda: not roomy.offer(lambda key: 1 + key[0]))
    wanted = [arena.bytes_of(1 + n).clone() for n in range(len(KEYS))]
    ticket = roomy.fetch(KEYS)
    roomy.grant(0)  # the trays are held: they stay until they are copied from
    for number in range(100, 250):
        roomy.keep(bytes([number]) * 16)
        roomy.offer(lambda key: 20 + key[0] % 20)
    receiver = Receiver(45)
    roomy.deliver(receiver)
    assert receiver.told == [(ticket, True)] * len(KEYS) + [(ticket, False)]
    for n, block in enumerate(wanted):
        assert torch.equal(arena.bytes_of(45 + n), block)


def test_blocks_known_before_the_disk_is_ready_are_saved_too(arena: Arena, spec: ShelfSpec) -> None:
    shelf = Shelf(arena, spec, 1 << 30)
    for key in KEYS:
        shelf.keep(key)
    assert shelf.offer(lambda key: 1 + key[0])
    shelf.start()
    until(lambda: not shelf.offer(lambda key: 1 + key[0]))
    until(lambda: shelf.stats().get("saved") == len(KEYS))


def test_threads_that_read_do_not_keep_trays_from_the_block_that_is_next(
    arena: Arena, spec: ShelfSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(opened(arena, spec), 1)
    monkeypatch.setattr(shelf_module, "READ_BYTES", 0)
    monkeypatch.setattr(disk_reader, "reader_threads", lambda: 8)  # of which two have trays
    monkeypatch.setattr(shelf_module, "reader_threads", lambda: 1)
    load = DiskTier.load

    def first_is_slow(tier: DiskTier, key: bytes, into: Sequence[Payload]) -> bool:
        time.sleep(0.02 if key[0] % 4 == 0 else 0.0)
        return load(tier, key, into)

    monkeypatch.setattr(DiskTier, "load", first_is_slow)
    monkeypatch.setattr(restoring, "PATIENCE_S", 1.0)
    shelf = opened(arena, spec)
    for _ in range(5):
        receiver = Receiver(40)
        fetch_all(shelf, receiver, KEYS)
        assert [more for _, more in receiver.told] == [True] * len(KEYS) + [False]
        shelf._trays.cache.clear()


def test_what_was_computed_before_a_clear_is_not_written_after_it(
    arena: Arena, spec: ShelfSpec
) -> None:
    shelf = opened(arena, spec)
    for key in KEYS[:6]:
        shelf.keep(key)
    time.sleep(0.001)
    Store(spec.directory, spec.quota).clear()
    for key in KEYS[6:]:
        shelf.keep(key)
    until(lambda: not shelf.offer(lambda key: 1 + key[0]))
    until(lambda: shelf.stats()["saved"] + shelf.stats()["cancelled"] == len(KEYS))
    assert shelf.stats()["saved"] == 6
    assert not shelf._saving._since


def test_memory_that_was_in_use_is_given_back_later(arena: Arena, roomy: Shelf) -> None:
    roomy.grant(64 * LAYOUT.block_bytes)
    keys = [bytes([number]) * 16 for number in range(60)]
    for key in keys:
        roomy.keep(key)
    until(lambda: not roomy.offer(lambda key: 1 + key[0]))
    ticket = roomy.fetch(keys)
    roomy.grant(0)
    assert roomy.tier_bytes > 0, "trays that are wanted were taken away"
    roomy.drop(ticket)
    roomy.trim()
    assert roomy.tier_bytes == 0


def test_a_tray_in_use_does_not_keep_the_others_memory(arena: Arena, roomy: Shelf) -> None:
    roomy.grant(64 * LAYOUT.block_bytes)
    keys = [bytes([number]) * 16 for number in range(60)]
    for key in keys:
        roomy.keep(key)
        roomy.offer(lambda key: 1 + key[0])
    roomy.fetch(keys[:1] + keys[30:31])  # held until they are copied
    before = roomy.stats()["ram_held_bytes"]
    roomy.grant(int(before) - 8 * LAYOUT.block_bytes)
    after = roomy.stats()["ram_held_bytes"]
    assert after == before - 8 * LAYOUT.block_bytes
    assert roomy.covers(keys[:1]) == roomy.covers(keys[30:31]) == 1


def test_a_little_less_does_not_cost_everything(arena: Arena, roomy: Shelf) -> None:
    roomy.grant(64 * LAYOUT.block_bytes)
    keys = [bytes([number]) * 16 for number in range(20)]
    for key in keys:
        roomy.keep(key)
        roomy.offer(lambda key: 1 + key[0])
    roomy.grant(48 * LAYOUT.block_bytes)  # more than is in use
    assert all(roomy.covers([key]) for key in keys)
