"""Slots of states: snapshots are copied or taken over, follow moves, and give way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.testing.fake_kv import FakeKv
from penstock.worker.kv.states.slots import States

if TYPE_CHECKING:
    from penstock.worker.kv.tables import KvHandle

BLOCK, STATE_BYTES = 4, 64


def keep(kv: FakeKv, tokens: list[int], content: int = 7) -> KvHandle:
    """A sequence that has computed all of its tokens and left a snapshot behind them."""
    cache = kv.cache
    handle = cache.open(tokens)
    cache.admit(handle, cache.match(handle, len(tokens)), len(tokens))
    cache.extend(handle, len(tokens))
    cache.states.snapshot(handle.state, len(tokens), passing=False)
    assert kv.states is not None
    kv.states.content[int(handle.state.pending[0].place[0]), 0] = content
    cache.commit(handle, len(tokens), len(tokens))
    cache.check()
    return handle


def state_of(kv: FakeKv, handle: KvHandle) -> int | None:
    assert kv.states is not None
    return kv.states.content.get((int(handle.state.place[0]), 0))


def admitted(kv: FakeKv, tokens: list[int]) -> KvHandle:
    handle = kv.cache.open(tokens)
    kv.cache.admit(handle, kv.cache.match(handle, len(tokens) - 1), len(tokens))
    kv.cache.check()
    return handle


def test_who_goes_on_behind_a_block_has_a_copy_of_the_state() -> None:
    kv = FakeKv(40, BLOCK, state_bytes=STATE_BYTES)
    first = keep(kv, list(range(8)))
    for _ in range(2):
        other = admitted(kv, [*range(8), 50])
        assert other.computed == 8
        assert state_of(kv, other) == 7
        assert other.state.place[0] != first.state.place[0]


def test_without_a_state_blocks_are_not_gone_on_from() -> None:
    kv = FakeKv(40, BLOCK, state_bytes=STATE_BYTES)
    kv.cache.release(keep(kv, list(range(12))))
    match = kv.cache.match(kv.cache.open([*range(8), 50, 51, 52, 53]), 11)
    assert (match.count, match.known) == (0, 2)
    match = kv.cache.match(kv.cache.open([*range(12), 50]), 12)
    assert (match.count, match.known) == (3, 3)


def test_where_there_is_no_room_for_both_the_snapshot_becomes_the_state() -> None:
    kv = FakeKv(5, BLOCK, state_bytes=STATE_BYTES)
    kv.cache.release(keep(kv, list(range(8))))
    handle = admitted(kv, [*range(8), *range(50, 60)])
    assert kv.cache.free_bytes < STATE_BYTES
    assert state_of(kv, handle) == 7
    assert not kv.cache.states.find(handle.hashes.key(1)), "it is written from now on"


def test_slots_follow_when_memory_is_compacted() -> None:
    kv = FakeKv(60, BLOCK, state_bytes=STATE_BYTES)
    handles = [admitted(kv, [number] * 8) for number in range(6)]
    assert kv.states is not None
    for number, handle in enumerate(handles):
        kv.states.content[int(handle.state.place[0]), 0] = number
    for handle in handles[:4]:
        kv.cache.release(handle)
    kv.cache.clear()
    before = kv.cache.committed_bytes
    kv.cache.compact()
    assert kv.cache.committed_bytes < before
    assert [state_of(kv, handle) for handle in handles[4:]] == [4, 5]
    kv.cache.check()


def test_states_are_evicted_for_whoever_needs_the_room() -> None:
    kv = FakeKv(12, BLOCK, state_bytes=STATE_BYTES)
    for number in range(20):
        kv.cache.release(keep(kv, [number] * 8))
    assert kv.cache.evictions > 0
    assert kv.cache.committed_bytes <= kv.cache.limit_bytes


@pytest.mark.parametrize("fails", [True, False])
def test_memory_that_fails_leaves_nothing_held(fails: bool) -> None:
    kv = FakeKv(40, BLOCK, state_bytes=STATE_BYTES)
    kv.cache.release(keep(kv, list(range(8))))
    held = kv.cache.held_bytes
    assert kv.states is not None
    kv.states.full = fails
    handle = kv.cache.open([*range(8), 50])
    match = kv.cache.match(handle, 8)
    if fails:
        with pytest.raises(MemoryError):
            while True:  # until it takes more memory
                kv.cache.admit(handle, match, 9)
                handle = kv.cache.open([*range(8), 50])
        kv.states.full = False
    else:
        kv.cache.admit(handle, match, 9)
    kv.cache.check()
    assert kv.cache.held_bytes >= held


def test_a_model_without_states_needs_none() -> None:
    states = States()
    assert states.find(b"any key") and states.back()
    assert not states.room(1 << 30)
