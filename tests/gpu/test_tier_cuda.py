"""KV of a GPU kept in RAM and on disk: it comes back as it was, and its memory goes back."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
import torch

from penstock.catalog.kv_formats import kv_format
from penstock.memory.readings.gauge import read_process
from penstock.testing import conversations, tiny
from penstock.testing.conversations import History, Talk
from penstock.testing.exactness import Reference
from penstock.worker.backends import open_backend
from penstock.worker.kv.arena import Arena, BlockLayout, LayerGeometry
from penstock.worker.kv.groups import LayerGroup
from penstock.worker.kv.offload.tiers import KvOffload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.worker.kv.offload.disk_reader import FetchRequest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIB = 1 << 20
LENGTHS = (40, 100, 70, 9, 130)
OPENINGS = [[7 + (n + (i if i != 2 else 1)) % 80 for n in range(s)] for i, s in enumerate(LENGTHS)]
TALK = Talk(OPENINGS, turns=3, answer=10, said=12, vocabulary=100)
CROWDED = {"pool_tokens": 208, "device": "cuda:0", "tier_bytes": 512 * MIB}
HISTORIES = (
    History("ram", disk=False, **CROWDED),  # type: ignore[arg-type]
    History("ram-as-served", disk=False, poisoned=False, **CROWDED),  # type: ignore[arg-type]
    History("ram-and-disk", poisoned=False, **CROWDED),  # type: ignore[arg-type]
    History("restarts", restarts=True, device="cuda:0"),
    History("ram-and-disk-in-8-bits", poisoned=False, kv_dtype="int8", **CROWDED),  # type: ignore[arg-type]
    History("restarts-in-8-bits", restarts=True, kv_dtype="int8", device="cuda:0"),
)
# A block of 256 KiB: GPU memory comes in pieces of 2 MiB, which the pool fills before it evicts.
WIDE = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
# A block of 1.2 MB, of which there are many in an extent.
LAYOUT = BlockLayout((LayerGeometry(8, 128, 128),) * 18, 16, kv_format("auto", "bfloat16"))
GROUP = LayerGroup(tuple(range(18)), None, LAYOUT.token_bytes, 16)
BLOCKS = 700


@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_found_kv_changes_no_token(history: History, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = tiny.save("llama", tmp_path / "llama", **WIDE)
    found = conversations.compare(
        Reference.load(folder, history.kv_dtype), folder, history, TALK, tmp_path / "work"
    )
    assert found.tally.tokens == len(OPENINGS) * TALK.turns * TALK.answer
    assert found.reused_tokens > found.prompt_tokens / 4
    assert found.tier_hits > 0
    assert (found.preemptions > 0) == (history.pool_tokens is not None)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(LAYOUT, BLOCKS, open_backend("cuda:0"))
    for extent in range(-(-BLOCKS // made.extent_blocks)):
        made.commit(extent)
    yield made
    made.close()


def key(block: int) -> bytes:
    return block.to_bytes(16, "little")


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_copies_and_steps_do_not_meet(arena: Arena) -> None:
    """Blocks are overwritten as soon as a step may, while they are on their way out and back."""
    tier = KvOffload([GROUP], [arena], None, 1 << 30, 1 << 30)
    tier.grant(1 << 30)
    rows = arena.rows_of(0, BLOCKS)
    chance = torch.Generator(device="cuda").manual_seed(1)
    for _ in range(6):
        blocks = torch.randperm(BLOCKS - 1)[:300].add_(1).tolist()
        rows.random_(0, 256, generator=chance)
        wanted = rows[blocks].clone()
        for block in blocks:
            tier.keep(0, key(block))
        left = True
        while left:  # each as a step would do it, as soon as its copy is on its way
            left = tier.offer(lambda _, name: int.from_bytes(name, "little"))
        tier.fence(0, blocks)
        rows[blocks] = 7
        places = blocks[::-1]
        keys = [key(block) for block in blocks]
        assert all(tier.covers(0, keys))
        request = tier.fetch(0, keys, places)

        def come(request: FetchRequest = request) -> bool:
            tier.deliver()
            return request.landed == len(request.keys)

        until(come)
        assert torch.equal(rows[places], wanted)
        tier._groups[
            0
        ].buffers.cache.clear()  # the same keys stand for other bytes in the next round
    assert tier.stats()["ram_bytes_per_s"] > 0


def test_a_step_waits_for_the_copy_of_a_block_that_it_writes(arena: Arena) -> None:
    tier = KvOffload([GROUP], [arena], None, 1 << 30, 1 << 30)
    tier.grant(1 << 30)
    rows = arena.rows_of(0, BLOCKS)
    blocks = list(range(1, 400))
    for _ in range(3):  # until the tier's memory is there
        rows.fill_(3)
        for block in blocks:
            tier.keep(0, key(block))
        until(lambda: not tier.offer(lambda _, name: int.from_bytes(name, "little")))
        tier._groups[0].buffers.cache.clear()
    rows.fill_(5)
    for block in blocks:
        tier.keep(0, key(block))
    tier.offer(lambda _, name: int.from_bytes(name, "little"))
    under_way = tier._groups[0].copies_out.under_way_bytes
    assert under_way, "the copies have ended: the test tests nothing"
    tier.fence(0, blocks)
    rows.fill_(9)
    until(lambda: not tier.offer(lambda _, name: int.from_bytes(name, "little")))
    first = under_way // LAYOUT.block_bytes
    for block in blocks[:first]:
        buffer = tier._groups[0].buffers.cache.find(key(block))
        assert buffer is not None
        assert int(tier._groups[0].buffers.rows[buffer].max()) == 5


def test_ram_that_is_taken_back_is_given_back(arena: Arena) -> None:
    tier = KvOffload([GROUP], [arena], None, 1 << 30, 1 << 30)
    held = []
    for turn in range(3):
        tier.grant(1 << 30)
        for block in range(1, 600):
            tier.keep(0, key(1000 * turn + block))
        until(lambda: not tier.offer(lambda _, name: int.from_bytes(name, "little") % 1000))
        assert tier.stats()["ram_held_bytes"] > 600 * MIB
        tier.grant(0)
        assert tier.stats()["ram_held_bytes"] == tier.limit_bytes == 0
        held.append(read_process(os.getpid()))
    # The first turn also brings what the device's libraries keep.
    if held[0] is not None and held[-1] is not None:  # some systems do not tell
        assert held[-1].anonymous_bytes - held[0].anonymous_bytes < 16 * MIB
