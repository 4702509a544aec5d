"""Blocks of sequences that come from a tier: which are asked for, and what follows when they have
come, or not. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.worker.kv.tables import BlockTable, GroupFetch

if TYPE_CHECKING:
    from penstock.worker.kv.held import HeldBlocks
    from penstock.worker.kv.tables import KvHandle


class Fetching:
    """Fetches for sequences, over the blocks that they hold."""

    def __init__(self, held: HeldBlocks) -> None:
        self._held = held
        self._groups = held.groups
        self._block_tokens = held.block_tokens

    def start(self, handle: KvHandle, last: int, free_bytes: int) -> None:
        """Have the blocks brought that the tier has, from the first that is not here."""
        if handle.known >= last:
            return
        first = handle.known
        keys = [handle.hashes.key(index) for index in range(first, last)]
        end = self._fetchable(handle, keys, free_bytes)
        if end <= first:
            return
        handle.fetch_end = end
        for number, group in enumerate(self._groups):
            begin = max(first, group.first_needed_block(end * self._block_tokens))
            before = handle.tables[number] if begin > first else None
            if before is not None:
                handle.tables[number] = later = BlockTable()
                later.free(begin)
            try:
                self._held.take(handle, number, end)
            except BaseException:
                handle.tables[number] = before or handle.tables[number]
                raise
            blocks = handle.tables[number].numbers[begin:end].tolist()
            fetch = self._held.tier.fetch(number, keys[begin - first : end - first], blocks)
            handle.fetches[number] = GroupFetch(fetch, begin, before)

    def _fetchable(self, handle: KvHandle, keys: list[bytes], free_bytes: int) -> int:
        """The most blocks such that a fetch completes what goes on from there."""
        first = handle.known
        there = [self._held.tier.covers(number, keys) for number in range(len(self._groups))]
        best, runs = first, [first - table.freed for table in handle.tables]
        for end in range(first + 1, first + len(keys) + 1):
            missing, enough = 0, True
            for number, group in enumerate(self._groups):
                runs[number] = runs[number] + 1 if there[number][end - 1 - first] else 0
                needed = end - group.first_needed_block(end * self._block_tokens)
                enough &= runs[number] >= needed
                if group.needs_all and runs[number] < end:
                    return best
                if not group.needs_all:  # those are taken already
                    missing += min(needed, end - first) * group.block_bytes
            if enough and missing <= free_bytes:
                best = end
        return best

    def take_landed(self, handle: KvHandle) -> None:
        """Let others find what has landed; when no more comes, go on behind it."""
        for number, mine in handle.fetches.items():
            table = handle.tables[number]
            while mine.inserted < mine.fetch.landed:
                index = mine.first + mine.inserted
                self._held.insert_one(number, int(table.numbers[index]), handle.hashes.key(index))
                mine.inserted += 1
        if not all(mine.fetch.done for mine in handle.fetches.values()):
            return
        count = self._brought(handle)
        for number, mine in handle.fetches.items():
            self._end(handle, number, mine, count)
        handle.fetches.clear()
        self._held.use(handle, count)

    def _brought(self, handle: KvHandle) -> int:
        """Blocks from the first on behind which the sequence can go on."""
        for count in range(handle.fetch_end, handle.known, -1):
            if all(
                mine.first + mine.fetch.landed >= count
                and mine.first
                <= max(
                    handle.known,
                    self._groups[number].first_needed_block(count * self._block_tokens),
                )
                for number, mine in handle.fetches.items()
            ):
                return count
        return handle.known

    def _end(self, handle: KvHandle, number: int, mine: GroupFetch, count: int) -> None:
        """Give back what is of no use; where nothing came, there are blocks to write."""
        table, cache, whole = (
            handle.tables[number],
            self._held.caches[number],
            handle.tables[number].count,
        )
        if count == handle.fetch_end:
            if mine.before is not None:
                cache.give(mine.before.blocks)
        elif mine.before is not None:
            cache.give(table.blocks)
            handle.tables[number] = mine.before
        else:
            cache.give(table.cut(count))
            tokens = whole * self._block_tokens
            self._held.take(handle, number, self._groups[number].admission_blocks(tokens))
