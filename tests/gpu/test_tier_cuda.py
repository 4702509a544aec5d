"""KV of a GPU kept in RAM and on disk: it comes back as it was, and its memory goes back."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
import torch

from penstock.memory.gauge import read_process
from penstock.testing import conversations, tiny
from penstock.testing.conversations import History, Talk
from penstock.testing.exactness import Reference
from penstock.worker.kv.arena import Arena, BlockLayout, LayerGeometry
from penstock.worker.kv.shelf import Shelf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

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
)
# A block of 1.2 MB, of which there are many in an extent.
LAYOUT = BlockLayout((LayerGeometry(8, 128, 128),) * 18, 16, torch.bfloat16)
BLOCKS = 700


@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_found_kv_changes_no_token(history: History, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = tiny.save("llama", tmp_path / "llama")
    found = conversations.compare(Reference.load(folder), folder, history, TALK, tmp_path / "work")
    assert found.tally.tokens == len(OPENINGS) * TALK.turns * TALK.answer
    assert found.reused_tokens > found.prompt_tokens / 4
    assert found.tier_hits > 0
    assert (found.preemptions > 0) == (history.pool_tokens is not None)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(LAYOUT, BLOCKS, torch.device("cuda:0"))
    for extent in range(-(-BLOCKS // made.extent_blocks)):
        made.commit(extent)
    yield made
    made.close()


class Receiver:
    """Wants blocks in these places."""

    def __init__(self, places: list[int]) -> None:
        self.places = places
        self.came = 0

    def place(self, ticket: int, index: int) -> int:
        return self.places[index]

    def arrived(self, ticket: int, *, more: bool) -> None:
        self.came += more


def key(block: int) -> bytes:
    return block.to_bytes(16, "little")


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_copies_and_steps_do_not_meet(arena: Arena) -> None:
    """Blocks are overwritten as soon as a step may, while they are on their way out and back."""
    shelf = Shelf(arena, None, 1 << 30, 1 << 30)
    shelf.grant(1 << 30)
    rows = arena.rows_of(0, BLOCKS)
    chance = torch.Generator(device="cuda").manual_seed(1)
    for _ in range(6):
        blocks = torch.randperm(BLOCKS - 1)[:300].add_(1).tolist()
        rows.random_(0, 256, generator=chance)
        wanted = rows[blocks].clone()
        for block in blocks:
            shelf.keep(key(block))
        left = True
        while left:  # each as a step would do it, as soon as its copy is on its way
            left = shelf.offer(lambda name: int.from_bytes(name, "little"))
        shelf.fence(blocks)
        rows[blocks] = 7
        places = blocks[::-1]
        receiver = Receiver(places)
        keys = [key(block) for block in blocks]
        assert shelf.covers(keys) == len(keys)
        shelf.fetch(keys)

        def come(receiver: Receiver = receiver) -> bool:
            shelf.deliver(receiver)
            return receiver.came == len(receiver.places)

        until(come)
        assert torch.equal(rows[places], wanted)
        shelf._trays.cache.clear()  # the same keys stand for other bytes in the next round
    assert shelf.stats()["ram_bytes_per_s"] > 0


def test_a_step_waits_for_the_copy_of_a_block_that_it_writes(arena: Arena) -> None:
    shelf = Shelf(arena, None, 1 << 30, 1 << 30)
    shelf.grant(1 << 30)
    rows = arena.rows_of(0, BLOCKS)
    blocks = list(range(1, 400))
    for _ in range(3):  # until the tier's memory is there
        rows.fill_(3)
        for block in blocks:
            shelf.keep(key(block))
        until(lambda: not shelf.offer(lambda name: int.from_bytes(name, "little")))
        shelf._trays.cache.clear()
    rows.fill_(5)
    for block in blocks:
        shelf.keep(key(block))
    shelf.offer(lambda name: int.from_bytes(name, "little"))
    under_way = shelf._out.under_way_bytes
    assert under_way, "the copies have ended: the test tests nothing"
    shelf.fence(blocks)
    rows.fill_(9)
    until(lambda: not shelf.offer(lambda name: int.from_bytes(name, "little")))
    first = under_way // LAYOUT.block_bytes
    for block in blocks[:first]:
        tray = shelf._trays.cache.find(key(block))
        assert tray is not None
        assert int(shelf._trays.rows[tray].max()) == 5


def test_ram_that_is_taken_back_is_given_back(arena: Arena) -> None:
    shelf = Shelf(arena, None, 1 << 30, 1 << 30)
    before = read_process(os.getpid())
    shelf.grant(1 << 30)
    for block in range(1, 600):
        shelf.keep(key(block))
    until(lambda: not shelf.offer(lambda name: int.from_bytes(name, "little")))
    assert shelf.stats()["ram_held_bytes"] > 600 * MIB
    shelf.grant(0)
    assert shelf.stats()["ram_held_bytes"] == shelf.tier_bytes == 0
    after = read_process(os.getpid())
    if before is not None and after is not None:  # some systems do not tell
        assert after.anonymous_bytes - before.anonymous_bytes < 64 * MIB
