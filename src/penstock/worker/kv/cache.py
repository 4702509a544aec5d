"""KV of all sequences: the one door to blocks, prefixes, host memory and disk. No torch.

A sequence has a handle with one table of blocks per layer group. Blocks are found by their keys,
taken, inserted when they are computed, and given back when the sequence ends or when a window has
passed them:

    match ──▶ admit ──▶ extend ──▶ (a step writes) ──▶ commit ──▶ ... ──▶ release

Nothing here calls the scheduler: what a fetch has brought shows in the handle after `poll`.

    group    table of a sequence at token 70, blocks of 16 tokens, window 32
    full     [ 4][ 5][ 9][ 2][ 7]
    window   [ 0][ 0][ 3][ 8][ 1]         0: has left the window, and is free
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.worker.kv.fetching import Fetching
from penstock.worker.kv.hashes import BlockHashes, media_extras, root_key
from penstock.worker.kv.held import HeldBlocks
from penstock.worker.kv.tables import BlockTable, KvHandle, Match

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.memory.cost import KvCost
    from penstock.wire import Media
    from penstock.worker.core.plan import Plan
    from penstock.worker.kv.groups import LayerGroup
    from penstock.worker.kv.pools import GroupMemory
    from penstock.worker.kv.tier import Tier


class KvCache:
    """Blocks of all groups, who holds them and what is in them."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        memories: Sequence[GroupMemory],
        cost: KvCost,
        limit_bytes: int,
        tier: Tier | None = None,
        states: GroupMemory | None = None,
    ) -> None:
        """`states`: the memory of the slots of a model with recurrent layers."""
        self._held = HeldBlocks(groups, memories, limit_bytes, tier, states)
        self.states = self._held.states
        self._fetching = Fetching(self._held)
        self.groups = self._held.groups
        self.block_tokens = self._held.block_tokens
        self.cost = cost
        self.ceiling_bytes: int | None = None  # sequences hold no more, whatever the limit is
        self.pools = self._held.pools
        self._caches = self._held.caches
        self._sizes = self.pools.block_bytes[: len(self.groups)]

    # --- how much there is ---

    @property
    def capacity_bytes(self) -> int:
        """What sequences can hold at once, beside the chunk that is being computed."""
        return max(0, self._usable_bytes - self.cost.chunk_bytes)

    @property
    def _usable_bytes(self) -> int:
        if self.ceiling_bytes is None:
            return self.pools.capacity_bytes
        return min(self.pools.capacity_bytes, self.ceiling_bytes + self.cost.chunk_bytes)

    @property
    def overhead_bytes(self) -> int:
        """Of the limit, what no sequence can hold."""
        unusable = self.pools.limit_bytes - self.pools.capacity_bytes
        return min(self.pools.overhead_bytes, unusable) + self.cost.chunk_bytes

    @property
    def limit_bytes(self) -> int:
        """What may be committed."""
        return self.pools.limit_bytes

    @property
    def unit_bytes(self) -> int:
        """In pieces of which memory is committed."""
        return self.pools.unit_bytes

    @property
    def committed_bytes(self) -> int:
        """Memory behind all blocks."""
        return self.pools.committed_bytes

    def limit_for(self, size_bytes: int) -> int:
        """The limit under which sequences can hold so much at once."""
        return self.pools.limit_for(size_bytes + self.cost.chunk_bytes)

    @property
    def held_bytes(self) -> int:
        """Of blocks in use, each counted once."""
        return self.pools.held_bytes

    @property
    def free_bytes(self) -> int:
        """What can still be taken, a chunk's own blocks included."""
        return max(0, self._usable_bytes - self.held_bytes)

    @property
    def evictable_bytes(self) -> int:
        """Of the free ones: computed, and found again by their tokens."""
        return sum(
            cache.evictable * size
            for cache, size in zip(self.pools.caches, self.pools.block_bytes, strict=True)
        )

    @property
    def evictions(self) -> int:
        """Blocks evicted since the start."""
        return sum(cache.evicted for cache in self.pools.caches)

    def need_bytes(self, tokens: int) -> int:
        """The most that a sequence of so many tokens holds."""
        return self.cost.sequence(tokens)

    def max_tokens(self) -> int:
        """The longest sequence that can run here alone."""
        addressed = [group.max_tokens(self.pools.blocks(n)) for n, group in enumerate(self.groups)]
        return min(self.cost.tokens_within(self.capacity_bytes), *addressed)

    def bytes_of(self, handle: KvHandle) -> int:
        """What a sequence holds, shared blocks included."""
        return len(list(handle.state.places)) * self.states.slot_bytes + sum(
            max(0, table.count - table.freed) * size
            for table, size in zip(handle.tables, self._sizes, strict=True)
        )

    # --- a sequence's life ---

    def open(
        self, tokens: Sequence[int], salt: bytes = b"", media: Sequence[Media] = ()
    ) -> KvHandle:
        """A handle without blocks; `tokens` grows, and what is in it does not change."""
        extras = media_extras(media, self.block_tokens)
        hashes = BlockHashes(root_key(salt), tokens, self.block_tokens, extras)
        return KvHandle(hashes, [BlockTable() for _ in self.groups])

    def match(self, handle: KvHandle, tokens: int) -> Match:
        """The most of the first `tokens` whose KV is here: every group has what a later row sees.

        Of full attention these are all blocks, of a window those that a row behind them sees; and
        where layers have a state, there must be a snapshot of it.
        """
        found: list[dict[int, int]] = [{} for _ in self.groups]
        full = [number for number, group in enumerate(self.groups) if group.needs_all]
        runs = [0] * len(self.groups)  # blocks in a row, up to this index
        count = known = 0
        for index in range(tokens // self.block_tokens):
            key = handle.hashes.key(index)
            for number, cache in enumerate(self._caches):
                block = cache.find(key)
                if block is not None:
                    found[number][index] = block
                runs[number] = 0 if block is None else runs[number] + 1
            if any(runs[number] <= index for number in full):
                break
            end = index + 1
            if all(
                runs[number] >= end - group.first_needed_block(end * self.block_tokens)
                for number, group in enumerate(self.groups)
            ):
                known = end
                count = end if self.states.find(key) else count
        return self._matched(found, count, known)

    def _matched(self, found: list[dict[int, int]], count: int, known: int) -> Match:
        kept, held = [], 0
        for group, cache, blocks in zip(self.groups, self._caches, found, strict=True):
            first = group.first_needed_block(count * self.block_tokens)
            mine = [blocks[index] for index in range(first, count)]
            kept.append(mine)
            held += sum(map(cache.is_held, mine)) * group.block_bytes
        return Match(tuple(kept), count, held, known)

    def admit(self, handle: KvHandle, match: Match, tokens: int, *, fetch: bool = True) -> None:
        """Share what was found, take the blocks that stay for all `tokens`, and fetch what the
        tier has; the caller has checked `free_bytes`. When memory fails nothing has changed."""
        self._held.admitted[id(handle)] = handle
        try:
            self._held.use(handle, match.count)
            for number, blocks in enumerate(match.blocks):
                for block in blocks:
                    self._caches[number].share(block)
                handle.tables[number].append(blocks)
            key = handle.hashes.key(match.count - 1) if match.count else None
            missing = self._held.missing_bytes(match, tokens) + self.states.slot_bytes
            self.states.begin(handle.state, key, self.free_bytes - missing)
            for number, group in enumerate(self.groups):
                self._held.take(handle, number, group.admission_blocks(tokens))
            if fetch and not self.states.slot_bytes:  # tiers keep no states
                self._fetching.start(handle, (tokens - 1) // self.block_tokens, self.free_bytes)
        except BaseException:
            self.release(handle)
            raise

    def back(self, match: Match, tokens: int) -> bool:
        """Whether `admit` would commit nothing that steps wait for; if not, a part of it is
        committed now, and the next call is nearer to it. Memory may fail."""
        return self.states.back() and all(
            self.pools.back(number, group.admission_blocks(tokens) - len(match.blocks[number]))
            for number, group in enumerate(self.groups)
        )

    def extendable(self, handle: KvHandle, end: int) -> bool:
        """Whether blocks for all tokens up to `end` can be had without taking anybody's."""
        last = -(-end // self.block_tokens)
        missing = sum(
            max(0, last - max(table.count, table.freed)) * size
            for table, size in zip(handle.tables, self._sizes, strict=True)
        )
        return missing <= self.free_bytes

    def extend(self, handle: KvHandle, end: int) -> None:
        """Have blocks for all tokens up to `end`, as far as they are still to be written."""
        last = -(-end // self.block_tokens)
        for number in range(len(self.groups)):
            self._held.take(handle, number, last)

    def retract(self, handle: KvHandle, end: int) -> None:
        """Give back the blocks behind all tokens up to `end`: nothing in them counts."""
        self._held.cut(handle, -(-end // self.block_tokens))

    def commit(self, handle: KvHandle, computed: int, known_tokens: int) -> None:
        """Tokens below `computed` are written, or will be by the step under way: let others find
        full blocks of known tokens, and free what has left the windows."""
        full = min(computed, known_tokens) // self.block_tokens
        while handle.known < full:
            self._held.insert(handle, handle.known)
            handle.known += 1
        self.states.commit(handle.state, handle.hashes, min(computed, known_tokens))
        self._held.free_passed(handle, computed)

    def catch_up(self, handle: KvHandle, computed: int, tokens: int) -> int:
        """Use what others have computed of the first `tokens`; how many are computed then."""
        if self.states.slot_bytes:
            self._held.go_on(handle, self.match(handle, tokens), computed)
            return max(computed, handle.computed)
        while computed % self.block_tokens == 0:
            index = computed // self.block_tokens
            if computed + self.block_tokens > tokens:
                break
            key = handle.hashes.key(index)
            found = [cache.find(key) for cache in self._caches]
            if any(block is None for block in found):
                break
            for number, block in enumerate(found):
                assert block is not None
                self._held.replace(handle, number, index, block)
            computed += self.block_tokens
            self._held.use(handle, index + 1)
        return computed

    def same_block(self, one: KvHandle, other: KvHandle, index: int) -> bool:
        """Whether two sequences have the same tokens up to the end of a block."""
        return one.hashes.key(index) == other.hashes.key(index)

    def release(self, handle: KvHandle) -> None:
        """Preempted, finished or cancelled: its blocks can be found until they are evicted."""
        del self._held.admitted[id(handle)]
        for number, group in enumerate(self.groups):
            first = group.first_needed_block(handle.known * self.block_tokens)
            keys = [handle.hashes.key(index) for index in range(first, handle.known)]
            self._held.tier.touch(number, keys)
        self._held.give_all(handle)

    def lend(self, count: int) -> list[list[int]]:
        """Blocks of every group for those who measure: so many, or as many as can be had."""
        size = sum(self._sizes)
        count = max(1, min(count, (self.free_bytes - self.states.slot_bytes) // size))
        # Sequences that nobody asked for have one state in common.
        counts = [count] * len(self.groups) + [1] * bool(self.states.slot_bytes)
        return [self.pools.take(number, some) for number, some in enumerate(counts)]

    def lend_rest(self) -> list[list[int]]:
        """All that can be had, so that everything is committed."""
        lent: list[list[int]] = []
        for number, size in enumerate(self.pools.block_bytes):
            count = min(self.free_bytes // size, self.pools.unheld(number))
            lent.append(self.pools.take(number, count))
        return lent

    def take_back(self, lent: list[list[int]]) -> None:
        """What was lent."""
        for cache, blocks in zip(self.pools.caches, lent, strict=False):
            cache.give(blocks)

    # --- what goes on beside steps ---

    def start(self) -> None:
        """All is measured: let tiers begin."""
        self._held.tier.start()

    def close(self) -> None:
        """Save what can be saved in the time that a shutdown has."""
        self._held.tier.close(self._find)

    def tidy(self) -> bool:
        """Offload what there is room for; whether more is left to do."""
        return self._held.tier.offer(self._find)

    def wait(self, seconds: float) -> None:
        """Until something arrives that was fetched."""
        self.poll()  # for those who have just asked
        self._held.tier.wait(seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step of so many prompt tokens took so long: what is sooner fetched depends on it."""
        self._held.tier.computed(tokens, seconds)

    def notices(self) -> list[str]:
        """What people should know of tiers that has not been told yet."""
        return self._held.tier.notices()

    def tier_stats(self) -> dict[str, float]:
        """Figures of the tiers."""
        return self._held.tier.stats()

    def _find(self, group: int, key: bytes) -> int | None:
        """Where a block lies now; None: it is gone."""
        return self._caches[group].find(key)

    def poll(self) -> None:
        """Let offload and onload make progress; what has come shows in the handles."""
        self._held.tier.deliver()
        for handle in self._held.admitted.values():
            if handle.fetches:
                self._fetching.take_landed(handle)
        self._held.tier.offer(self._find)

    def fence(self, plan: Plan) -> None:
        """A step is about to write the plan's rows: they must not meet a copy."""
        for number in range(len(self.groups)):
            self._held.tier.fence(number, plan.written(number, self.block_tokens))

    # --- how much it may be ---

    def set_limit(self, limit_bytes: int) -> None:
        """Commit no more than this from now on; `trim` gives back what is beyond."""
        self.pools.set_limit(limit_bytes)

    def grant_tier(self, size_bytes: int) -> None:
        """Let KV in host memory be so much."""
        self._held.tier.grant(size_bytes)

    @property
    def tier_bytes(self) -> int:
        """What KV in host memory may hold, or still holds."""
        return self._held.tier.limit_bytes

    @property
    def queue_bytes(self) -> int:
        """Of the host buffers that are always there."""
        return self._held.tier.queue_bytes

    def trim(self) -> int:
        """Evict what is beyond the limit and give its memory back; how many bytes."""
        before = self.pools.committed_bytes
        self.pools.trim()
        return before - self.pools.committed_bytes

    def compact(self) -> int:
        """Give all memory back that is not needed for what is there; how many bytes."""
        before = self.pools.committed_bytes
        self._held.tier.trim()
        self.pools.compact()
        return before - self.pools.committed_bytes

    def clear(self) -> None:
        """Let nothing be found that is here now."""
        for cache in self.pools.caches:
            cache.clear()

    def check(self) -> None:
        """Blocks, holders and tables agree."""
        held: list[list[int]] = []
        for number in range(len(self.groups)):
            tables = self._held.tables(number)
            for table in tables:
                assert all(table.blocks), "an index has no block"
                assert not table.numbers[: table.freed].any(), "a freed block is in a table"
            held.append([block for table in tables for block in table.blocks])
        self.pools.check(held + self._held.state_slots())

    def check_writable(self, handle: KvHandle, start: int) -> None:
        """No block that a sequence will write from `start` on is one that others may read."""
        for table, cache in zip(handle.tables, self._caches, strict=True):
            assert start <= table.count * self.block_tokens, "computed tokens without a block"
            ahead = table.numbers[start // self.block_tokens :].tolist()
            assert not any(map(cache.is_inserted, ahead)), "a known block would be written"
