"""Which blocks sequences hold in each layer group: taken, shared, inserted, given back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.worker.kv.pools import GroupedPools
from penstock.worker.kv.states.slots import States, StateSlots
from penstock.worker.kv.tables import BlockTable
from penstock.worker.kv.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.worker.kv.groups import LayerGroup
    from penstock.worker.kv.pools import GroupMemory
    from penstock.worker.kv.tables import KvHandle, Match


class HeldBlocks:
    """The tables of all admitted sequences over the pools of all groups."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        memories: Sequence[GroupMemory],
        limit_bytes: int,
        tier: Tier | None,
        states: GroupMemory | None,
    ) -> None:
        self.groups = tuple(groups)
        self.block_tokens = groups[0].block_tokens
        everything = memories if states is None else [*memories, states]
        self.pools = GroupedPools(everything, limit_bytes)
        self.caches = self.pools.caches[: len(groups)]
        self.states = States()
        if states is not None:
            self.states = StateSlots(self.pools, len(groups), states)
        self.tier = tier or Tier()
        self.admitted: dict[int, KvHandle] = {}
        self.pools.listen(self)

    def before_moves(self) -> None:
        """Blocks are about to move: wait for copies of them."""
        self.tier.before_moves()

    def moved(self, group: int, moves: dict[int, int]) -> None:
        """Blocks have been copied elsewhere: old number to new."""
        if group == len(self.groups):
            self.states.moved((handle.state for handle in self.admitted.values()), moves)
            return
        for table in self.tables(group):
            numbers = table.numbers
            for place, block in enumerate(numbers.tolist()):
                if block in moves:
                    numbers[place] = moves[block]
        self.tier.moved(group, moves)

    def give_all(self, handle: KvHandle) -> None:
        """A sequence leaves its blocks; what is inserted can be found until it is evicted."""
        for number, mine in handle.fetches.items():
            self.tier.drop(number, mine.fetch)
            if mine.before is not None:
                self.caches[number].give(mine.before.blocks)
        handle.fetches.clear()
        self.states.release(handle.state)
        for number, table in enumerate(handle.tables):
            self.caches[number].give(table.blocks)
            handle.tables[number] = BlockTable()
        handle.known = handle.computed = 0

    def missing_bytes(self, match: Match, tokens: int) -> int:
        """Of blocks that an admitted sequence takes beside what was found."""
        return sum(
            max(0, group.admission_blocks(tokens) - len(blocks)) * group.block_bytes
            for group, blocks in zip(self.groups, match.blocks, strict=True)
        )

    def go_on(self, handle: KvHandle, match: Match, computed: int) -> None:
        """Use what was found of a sequence with a state that has computed less of it."""
        if match.count * self.block_tokens <= computed:
            return
        for number, blocks in enumerate(match.blocks):
            old, cache = handle.tables[number], self.caches[number]
            for block in blocks:
                cache.share(block)
            handle.tables[number] = table = BlockTable()
            table.free(match.count - len(blocks))
            table.append(blocks + old.numbers[match.count :].tolist())
            cache.give(old.numbers[old.freed : match.count].tolist())
        self.states.go_on(handle.state, handle.hashes.key(match.count - 1))
        self.use(handle, match.count)

    def state_slots(self) -> list[list[int]]:
        """The slots that sequences hold, as a list of one group; of a model without, none."""
        if not self.states.slot_bytes:
            return []
        places = (place for handle in self.admitted.values() for place in handle.state.places)
        return [[int(place[0]) for place in places]]

    def tables(self, group: int) -> list[BlockTable]:
        """All that hold blocks of a group."""
        tables = []
        for handle in self.admitted.values():
            tables.append(handle.tables[group])
            mine = handle.fetches.get(group)
            if mine is not None and mine.before is not None:
                tables.append(mine.before)
        return tables

    def replace(self, handle: KvHandle, number: int, index: int, block: int) -> None:
        """Put a shared block at an index of the table and free the block that stood there."""
        table = handle.tables[number]
        self.caches[number].share(block)
        if index < table.count:
            self.caches[number].give([int(table.numbers[index])])
            table.numbers[index] = block
        else:
            table.append([block])

    def take(self, handle: KvHandle, number: int, end: int) -> None:
        """Blocks for the indexes up to `end` that have none."""
        table = handle.tables[number]
        missing = end - max(table.count, table.freed)
        if missing > 0:
            table.append(self.pools.take(number, missing))

    def cut(self, handle: KvHandle, count: int) -> None:
        """Have no blocks from an index on: such as nobody was ever told of."""
        for number, table in enumerate(handle.tables):
            if table.count > max(count, table.freed):
                self.caches[number].give(table.cut(count))

    def use(self, handle: KvHandle, blocks: int) -> None:
        """Its first blocks are computed and known."""
        handle.known = blocks
        handle.computed = blocks * self.block_tokens
        self.free_passed(handle, handle.computed)

    def free_passed(self, handle: KvHandle, computed: int) -> None:
        """Give blocks back that no row from `computed` on sees."""
        for number, group in enumerate(self.groups):
            end = min(group.first_needed_block(computed), handle.known)
            if end > handle.tables[number].freed:
                self.caches[number].give(handle.tables[number].free(end))

    def insert(self, handle: KvHandle, index: int) -> None:
        """Let others find a block of every group."""
        key = handle.hashes.key(index)
        for number, table in enumerate(handle.tables):
            self.insert_one(number, int(table.numbers[index]), key)

    def insert_one(self, number: int, block: int, key: bytes) -> None:
        if self.caches[number].insert(block, key):
            self.tier.keep(number, key)
