"""KV between the arena and the disk: what was saved comes back to its place, or not at all."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock.catalog.kv_formats import INT8, kv_format
from penstock.tiers import DiskTier, Quota, Store
from penstock.worker.backends.cpu import CpuBackend
from penstock.worker.kv.arena import Arena, BlockLayout, LayerGeometry
from penstock.worker.kv.groups import LayerGroup
from penstock.worker.kv.identity import ModelFiles
from penstock.worker.kv.offload import disk_reader, host_buffers, incoming, tiers
from penstock.worker.kv.offload.disk_reader import DiskSpec, FetchRequest
from penstock.worker.kv.offload.tiers import KvOffload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from penstock.tiers import Payload

KEYS = [bytes([n]) * 16 for n in range(12)]
LAYOUT = BlockLayout((LayerGeometry(2, 64, 64),) * 2, 16, kv_format("auto", "float32"))
GROUP = LayerGroup((0, 1), None, LAYOUT.token_bytes, 16)


class OneGroup:
    """A tier for one group of layers, asked without the group's number."""

    def __init__(self, arena: Arena, spec: DiskSpec | None, grant: int, max_tier: int = 0) -> None:
        group = LayerGroup((0, 1), None, arena.layout.token_bytes, 16)
        self.tier = KvOffload([group], [arena], spec, grant, max_tier)
        self.group = self.tier._groups[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tier, name)

    def keep(self, key: bytes) -> None:
        self.tier.keep(0, key)

    def offer(self, find: Callable[[bytes], int | None]) -> bool:
        return self.tier.offer(lambda _, key: find(key))

    def close(self) -> None:
        self.tier.close(lambda *_: None)

    def covers(self, keys: list[bytes]) -> int:
        """How many, from the first on."""
        found = self.tier.covers(0, keys)
        return found.index(False) if False in found else len(keys)

    def fetch(self, keys: list[bytes], first: int) -> FetchRequest:
        """To blocks from `first` on."""
        return self.tier.fetch(0, keys, list(range(first, first + len(keys))))

    def drop(self, request: FetchRequest) -> None:
        self.tier.drop(0, request)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(LAYOUT, 64, CpuBackend(), 1 << 20)
    for extent in range(-(-64 // made.extent_blocks)):
        made.commit(extent)
    yield made
    made.close()


@pytest.fixture
def spec(tmp_path: Path) -> DiskSpec:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    quota = Quota.parse(str(1 << 30))
    files = ModelFiles.now(model, with_code=False)
    return DiskSpec(tmp_path / "kv", quota, files, tmp_path / "digests.json", "float32", "m")


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def opened(arena: Arena, spec: DiskSpec) -> OneGroup:
    made = OneGroup(arena, spec, 1 << 30)
    made.start()
    until(lambda: "saved" in made.stats())
    return made


def fill(arena: Arena, first: int, count: int) -> None:
    for block in range(first, first + count):
        arena.bytes_of(block).copy_(torch.randint(0, 255, (LAYOUT.block_bytes,), dtype=torch.uint8))


def save_all(tier: OneGroup, first: int) -> None:
    """The block of KEYS[n] is `first` + n."""
    for key in KEYS:
        tier.keep(key)
    until(lambda: not tier.offer(lambda key: first + key[0]))
    until(lambda: tier.stats()["saved"] == len(KEYS))


def fetch_all(tier: OneGroup, keys: list[bytes], first: int) -> int:
    """To blocks from `first` on; how many came."""
    request = tier.fetch(keys, first)

    def ended() -> bool:
        tier.deliver()
        return request.done

    until(ended)
    return request.landed


def test_what_was_saved_comes_back_to_its_place(arena: Arena, spec: DiskSpec) -> None:
    fill(arena, 1, len(KEYS))
    first = opened(arena, spec)
    save_all(first, 1)
    first.close()

    again = opened(arena, spec)  # another worker, after a restart
    assert again.covers([*KEYS, b"x" * 16]) == len(KEYS)
    assert again.covers([b"x" * 16, *KEYS]) == 0
    assert fetch_all(again, KEYS, 40) == len(KEYS)
    for n in range(len(KEYS)):
        assert torch.equal(arena.bytes_of(1 + n), arena.bytes_of(40 + n))


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_kv_in_8_bits_comes_back_to_the_bit(spec: DiskSpec, place: str) -> None:
    """Codes, and scales of which some are no number."""
    arena = Arena(BlockLayout(LAYOUT.layers, 16, INT8), 64, CpuBackend(), 1 << 20)
    for extent in range(-(-64 // arena.extent_blocks)):
        arena.commit(extent)
    blocks = torch.arange(1, 1 + len(KEYS)).repeat_interleave(16)
    slots = torch.arange(16).repeat(len(KEYS))
    for layer in arena.layers:
        new = torch.randn(len(blocks), 2, 64)
        new[7, 1, 3] = float("nan")
        layer.store(blocks, slots, new, new.flip(0))
    size = arena.block_bytes
    if place == "disk":
        first = opened(arena, spec)
        save_all(first, 1)
        first.close()
        tier = opened(arena, spec)
    else:
        tier = OneGroup(arena, None, 1 << 20, 64 * size)
        tier.start()
        tier.grant(64 * size)
        for key in KEYS:
            tier.keep(key)
        until(lambda: not tier.offer(lambda key: 1 + key[0]))
    assert fetch_all(tier, KEYS, 40) == len(KEYS)
    wanted, found = torch.arange(1, 1 + len(KEYS)), torch.arange(40, 40 + len(KEYS))
    for layer in arena.layers:
        for view in (view.view(torch.int8) for view in layer.tensors):
            assert torch.equal(view[found], view[wanted])
        restored = zip(
            layer.load(found, torch.float32), layer.load(wanted, torch.float32), strict=True
        )
        for one, other in restored:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
            assert bool(one.isnan().any())
    arena.close()


def test_other_weights_find_nothing(arena: Arena, spec: DiskSpec) -> None:
    tier = opened(arena, spec)
    save_all(tier, 1)
    tier.close()
    folder = spec.files.folder
    (folder / "config.json").write_text('{"changed": true}')
    spec = replace(spec, files=ModelFiles.now(folder, with_code=False))
    assert opened(arena, spec).covers(KEYS) == 0


def test_files_that_changed_since_the_load_are_not_the_loaded_ones(
    arena: Arena, spec: DiskSpec
) -> None:
    (spec.files.folder / "config.json").write_text('{"changed": true}')
    tier = OneGroup(arena, spec, 1 << 30)
    tier.start()
    until(lambda: tier._notices)
    assert tier.notices() == [
        "KV of m is not kept on disk: its files have changed since it was loaded"
    ]
    assert not spec.directory.exists()
    tier.keep(KEYS[0])
    assert not tier.offer(lambda _: 1)  # nothing that would be saved one day


def test_a_damaged_block_ends_the_fetch(arena: Arena, spec: DiskSpec) -> None:
    fill(arena, 1, len(KEYS))
    tier = opened(arena, spec)
    save_all(tier, 1)
    victim = next(spec.directory.rglob(f"*{KEYS[5].hex()}*"))
    content = bytearray(victim.read_bytes())
    content[-7] ^= 1
    victim.write_bytes(content)
    tier = opened(arena, spec)  # whose buffers are empty
    assert fetch_all(tier, KEYS, 40) == 5
    assert tier.covers(KEYS) == 5
    assert tier.stats()["bad_removed"] == 1


def test_what_is_dropped_is_put_nowhere_and_blocks_nobody(arena: Arena, spec: DiskSpec) -> None:
    fill(arena, 1, len(KEYS))
    tier = opened(arena, spec)
    save_all(tier, 1)
    tier = opened(arena, spec)
    before = arena.bytes_of(40).clone()
    for _ in range(300):  # more than there are buffers, if one were lost each time
        tier.drop(tier.fetch(KEYS, 40))
    assert fetch_all(tier, KEYS[:3], 50) == 3
    assert torch.equal(arena.bytes_of(40), before)
    assert fetch_all(tier, KEYS, 50) == len(KEYS)


def test_a_disk_that_hangs_is_not_waited_for(
    arena: Arena, spec: DiskSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(opened(arena, spec), 1)
    tier = opened(arena, spec)
    answers = threading.Event()
    load = DiskTier.load

    def hanging(tier: DiskTier, key: bytes, into: Sequence[Payload]) -> bool:
        return answers.wait(20) and load(tier, key, into)

    monkeypatch.setattr(DiskTier, "load", hanging)
    monkeypatch.setattr(incoming, "PATIENCE_S", 0.05)
    assert fetch_all(tier, KEYS, 40) == 0
    assert tier.covers(KEYS) == 0  # until it answers
    answers.set()

    def answered() -> bool:
        tier.deliver()
        return tier.covers(KEYS) == len(KEYS)

    until(answered)


def test_what_is_sooner_computed_is_not_read(
    arena: Arena, spec: DiskSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(opened(arena, spec), 1)
    tier = opened(arena, spec)
    fetch_all(tier, KEYS[:6], 40)  # now the disk's rate is known
    tier.computed(tokens=16, seconds=10.0)
    assert tier.covers(KEYS) == len(KEYS)
    for _ in range(60):
        tier.computed(tokens=1 << 20, seconds=1e-6)
    assert tier.covers(KEYS[6:]) == 0
    monkeypatch.setattr(tiers, "TRY_AGAIN_S", 0.0)  # the disk may have been busy then
    assert tier.covers(KEYS[6:]) == 6


def test_a_block_that_was_evicted_before_its_turn_is_not_saved(
    arena: Arena, spec: DiskSpec
) -> None:
    tier = opened(arena, spec)
    tier.keep(KEYS[0])
    assert not tier.offer(lambda _: None)
    tier.close()
    assert tier.stats()["accepted"] == 0


@pytest.fixture
def roomy(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> OneGroup:
    """Without a disk, for a tier in RAM of many pieces."""
    monkeypatch.setattr(host_buffers, "EXTENT_BYTES", 8 * LAYOUT.block_bytes)
    made = OneGroup(arena, None, 1 << 20, 64 * LAYOUT.block_bytes)
    made.start()
    return made


def kept(tier: OneGroup) -> int:
    return tier.covers(KEYS)


def test_blocks_come_back_from_ram_without_a_disk(arena: Arena, roomy: OneGroup) -> None:
    fill(arena, 1, len(KEYS))
    for key in KEYS:
        roomy.keep(key)
    assert not roomy.offer(lambda key: 1 + key[0]), "nothing was granted"
    assert kept(roomy) == 0
    roomy.grant(64 * LAYOUT.block_bytes)
    until(lambda: not roomy.offer(lambda key: 1 + key[0]))
    assert kept(roomy) == len(KEYS)
    assert fetch_all(roomy, KEYS, 40) == len(KEYS)
    for n in range(len(KEYS)):
        assert torch.equal(arena.bytes_of(1 + n), arena.bytes_of(40 + n))
    assert roomy.stats()["ram_hits"] == len(KEYS)


def test_ram_that_is_taken_back_is_given_back(arena: Arena, roomy: OneGroup) -> None:
    roomy.grant(64 * LAYOUT.block_bytes)
    for number in range(60):
        roomy.keep(bytes([number]) * 16)
        roomy.offer(lambda key: 1 + key[0])
    held = roomy.stats()["ram_held_bytes"]
    assert 0 < held <= roomy.limit_bytes <= 64 * LAYOUT.block_bytes
    roomy.grant(int(held) // 2)
    assert roomy.stats()["ram_held_bytes"] <= roomy.limit_bytes <= held // 2
    roomy.grant(0)
    assert roomy.stats()["ram_held_bytes"] == roomy.limit_bytes == 0
    # What is left in the first buffers is whole.
    left = [key for key in (bytes([n]) * 16 for n in range(60)) if roomy.covers([key])]
    for key in left:
        fetch_all(roomy, [key], 62)
        assert torch.equal(arena.bytes_of(62), arena.bytes_of(1 + key[0]))


def test_a_buffer_that_is_wanted_is_not_given_to_another(arena: Arena, roomy: OneGroup) -> None:
    roomy.grant(64 * LAYOUT.block_bytes)
    fill(arena, 1, 60)
    for key in KEYS:
        roomy.keep(key)
    until(lambda: not roomy.offer(lambda key: 1 + key[0]))
    wanted = [arena.bytes_of(1 + n).clone() for n in range(len(KEYS))]
    request = roomy.fetch(KEYS, 45)
    roomy.grant(0)  # the buffers are held: they stay until they are copied from
    for number in range(100, 250):
        roomy.keep(bytes([number]) * 16)
        roomy.offer(lambda key: 20 + key[0] % 20)
    roomy.deliver()
    assert request.done and request.landed == len(KEYS)
    for n, block in enumerate(wanted):
        assert torch.equal(arena.bytes_of(45 + n), block)


def test_blocks_known_before_the_disk_is_ready_are_saved_too(arena: Arena, spec: DiskSpec) -> None:
    tier = OneGroup(arena, spec, 1 << 30)
    for key in KEYS:
        tier.keep(key)
    assert tier.offer(lambda key: 1 + key[0])
    tier.start()
    until(lambda: not tier.offer(lambda key: 1 + key[0]))
    until(lambda: tier.stats().get("saved") == len(KEYS))


def test_threads_that_read_do_not_keep_buffers_from_the_block_that_is_next(
    arena: Arena, spec: DiskSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(opened(arena, spec), 1)
    monkeypatch.setattr(tiers, "READ_BYTES", 0)
    monkeypatch.setattr(disk_reader, "reader_threads", lambda: 8)  # of which two have buffers
    monkeypatch.setattr(tiers, "reader_threads", lambda: 1)
    load = DiskTier.load

    def first_is_slow(tier: DiskTier, key: bytes, into: Sequence[Payload]) -> bool:
        time.sleep(0.02 if key[0] % 4 == 0 else 0.0)
        return load(tier, key, into)

    monkeypatch.setattr(DiskTier, "load", first_is_slow)
    monkeypatch.setattr(incoming, "PATIENCE_S", 1.0)
    tier = opened(arena, spec)
    for _ in range(5):
        assert fetch_all(tier, KEYS, 40) == len(KEYS)
        tier.group.buffers.cache.clear()


def test_what_was_computed_before_a_clear_is_not_written_after_it(
    arena: Arena, spec: DiskSpec
) -> None:
    tier = opened(arena, spec)
    for key in KEYS[:6]:
        tier.keep(key)
    time.sleep(0.001)
    Store(spec.directory, spec.quota).clear()
    for key in KEYS[6:]:
        tier.keep(key)
    until(lambda: not tier.offer(lambda key: 1 + key[0]))
    until(lambda: tier.stats()["saved"] + tier.stats()["cancelled"] == len(KEYS))
    assert tier.stats()["saved"] == 6
    assert not tier.group.offload._since


def test_memory_that_was_in_use_is_given_back_later(arena: Arena, roomy: OneGroup) -> None:
    roomy.grant(64 * LAYOUT.block_bytes)
    keys = [bytes([number]) * 16 for number in range(60)]
    for key in keys:
        roomy.keep(key)
    until(lambda: not roomy.offer(lambda key: 1 + key[0]))
    request = roomy.fetch(keys, 1)
    roomy.grant(0)
    assert roomy.limit_bytes > 0, "buffers that are wanted were taken away"
    roomy.drop(request)
    roomy.trim()
    assert roomy.limit_bytes == 0


def test_a_buffer_in_use_does_not_keep_the_others_memory(arena: Arena, roomy: OneGroup) -> None:
    roomy.grant(64 * LAYOUT.block_bytes)
    keys = [bytes([number]) * 16 for number in range(60)]
    for key in keys:
        roomy.keep(key)
        roomy.offer(lambda key: 1 + key[0])
    roomy.fetch(keys[:1] + keys[30:31], 1)  # held until they are copied
    before = roomy.stats()["ram_held_bytes"]
    roomy.grant(int(before) - 8 * LAYOUT.block_bytes)
    after = roomy.stats()["ram_held_bytes"]
    assert after == before - 8 * LAYOUT.block_bytes
    assert roomy.covers(keys[:1]) == roomy.covers(keys[30:31]) == 1


def test_a_little_less_does_not_cost_everything(arena: Arena, roomy: OneGroup) -> None:
    roomy.grant(64 * LAYOUT.block_bytes)
    keys = [bytes([number]) * 16 for number in range(20)]
    for key in keys:
        roomy.keep(key)
        roomy.offer(lambda key: 1 + key[0])
    roomy.grant(48 * LAYOUT.block_bytes)  # more than is in use
    assert all(roomy.covers([key]) for key in keys)
