"""Blocks of several sizes over one budget: what can be held."""

from __future__ import annotations

from penstock.testing.fake_kv import FakeMemory
from penstock.worker.kv.groups import LayerGroup
from penstock.worker.kv.pools import GroupedPools


def test_nothing_is_wasted_where_all_addresses_are_within_the_limit() -> None:
    """A small model on a device whose memory comes in large pieces has one extent in each group."""
    groups = [LayerGroup((0,), None, 8, 4), LayerGroup((1,), 6, 16, 4)]
    memories = [FakeMemory(group.block_bytes, blocks=16, extent_blocks=16) for group in groups]
    pools = GroupedPools(memories, sum(memory.unit_bytes for memory in memories))
    assert pools.capacity_bytes == sum(15 * memory.block_bytes for memory in memories)
    for number in range(len(groups)):
        assert len(pools.take(number, 15)) == 15
