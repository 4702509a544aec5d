"""Plans as numbers: what each row reads, writes and sees, without a device."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.worker.backends.cuda.paged_batch import Cut, describe
from penstock.worker.core.plan import UNKNOWN, Plan, Slice

CUT = Cut(block_tokens=4, columns=8, spread=6, tile_rows=3)


def piece(number: int, tokens: list[int], blocks: list[int], start: int) -> Slice:
    """The tokens from `start` on; the last samples."""
    table = np.asarray(blocks, np.int32)
    return Slice(number, start, tokens[start:], (table,), 1, samples=True)


def test_rows_of_decodes_and_chunks() -> None:
    one = piece(0, [5, 6, 7, 8, 9], [3, 1], 4)
    two = piece(1, list(range(20, 27)), [2, 5], 1)
    found = describe(Plan([one], [two]), {}, CUT)
    (group,) = found.groups
    assert found.ids.tolist() == [9, 21, 22, 23, 24, 25, 26]
    assert found.positions.tolist() == [4, 1, 2, 3, 4, 5, 6]
    assert group.slots.tolist() == [4, 9, 10, 11, 20, 21, 22]
    assert found.wanted.tolist() == [0, 6]
    assert found.contexts.tolist() == [5, 7]
    assert [group.tables[start] for start in found.starts] == [3, 2]
    # Tiles of the chunk, the one that sees most first: sequence, first row, its row, its count.
    assert found.tiles.T.tolist() == [[1, 3, 1, 6], [1, 0, 1, 6]]


def test_a_token_that_only_the_device_knows_is_named_by_its_place() -> None:
    found = describe(Plan([piece(7, [5, 6, 7, UNKNOWN], [3], 3)]), {7: 4}, CUT)
    assert found.ids.tolist() == [-5]


def test_missing_rows_see_one_token_of_the_reserved_block() -> None:
    found = describe(Plan([piece(0, [5, 6, 7], [3], 2)]), {}, CUT, padded=4)
    (group,) = found.groups
    assert group.slots.tolist() == [14, 0, 0, 0]
    assert found.contexts.tolist() == [3, 1, 1, 1]
    assert [group.tables[start] for start in found.starts] == [3, 0, 0, 0]
    assert group.counts.tolist() == [1, 1, 1, 1]
    assert found.decodes == 4


@pytest.mark.parametrize("contexts", [[1], [100], [1, 8, 9, 500], [64] * 12])
def test_work_items_cover_every_context_once(contexts: list[int]) -> None:
    plan = Plan()
    for number, context in enumerate(contexts):
        blocks = list(range(1, 2 + context // 4))
        plan.decodes.append(piece(number, [0] * context, blocks, context - 1))
    (found,) = describe(plan, {}, CUT).groups
    assert found.items.shape[1] <= len(contexts) + CUT.spread
    for index, context in enumerate(contexts):
        mine = found.items[:, found.items[0] == index]
        assert mine.shape[1] == found.counts[index]
        assert mine[3].tolist() == list(range(mine.shape[1]))
        seen = np.concatenate([np.arange(begin, end) for _, begin, end, _ in mine.T])
        assert seen.tolist() == list(range(context))
        assert not (mine[1] % CUT.columns).any()


def test_work_items_of_a_window_cover_what_is_seen() -> None:
    cut = Cut(block_tokens=4, columns=8, spread=6, tile_rows=3, windows=(None, 10))
    plan = Plan()
    for number, context in enumerate([3, 10, 57]):
        table = np.arange(1, 2 + context // 4, dtype=np.int32)
        tables = (table, table + 100)
        plan.decodes.append(Slice(number, context - 1, [0], tables, 1, samples=True))
    full, window = describe(plan, {}, cut).groups
    assert (window.tables[window.tables > 0] - 100).tolist() == full.tables[
        full.tables > 0
    ].tolist()
    for index, context in enumerate([3, 10, 57]):
        mine = window.items[:, window.items[0] == index]
        assert mine.shape[1] == window.counts[index]
        seen = np.concatenate([np.arange(begin, end) for _, begin, end, _ in mine.T])
        assert seen.tolist() == list(range(max(0, context - 10), context))
