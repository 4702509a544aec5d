"""Plans as numbers: what each row reads, writes and sees, without a device."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.wire import Sampling, Submit
from penstock.worker.engine.paged_batch import Cut, describe
from penstock.worker.scheduling.plan import Plan, Slice
from penstock.worker.scheduling.sequence import UNKNOWN, Sequence

CUT = Cut(block_tokens=4, columns=8, spread=6, tile_rows=3)


def sequence(number: int, tokens: list[int], blocks: list[int]) -> Sequence:
    found = Sequence(Submit(number, tokens, 9, Sampling(temperature=0)), number)
    found.blocks = blocks
    return found


def test_rows_of_decodes_and_chunks() -> None:
    one, two = sequence(0, [5, 6, 7, 8, 9], [3, 1]), sequence(1, list(range(20, 27)), [2, 5])
    found = describe(Plan([Slice(one, 4, 1)], [Slice(two, 1, 6)]), {}, CUT)
    assert found.ids.tolist() == [9, 21, 22, 23, 24, 25, 26]
    assert found.positions.tolist() == [4, 1, 2, 3, 4, 5, 6]
    assert found.slots.tolist() == [4, 9, 10, 11, 20, 21, 22]
    assert found.wanted.tolist() == [0, 6]
    assert found.contexts.tolist() == [5, 7]
    assert [found.tables[start] for start in found.starts] == [3, 2]
    # Tiles of the chunk, the one that sees most first: sequence, first row, its row, its count.
    assert found.tiles.T.tolist() == [[1, 3, 1, 6], [1, 0, 1, 6]]


def test_a_token_that_only_the_device_knows_is_named_by_its_place() -> None:
    one = sequence(0, [5, 6, 7], [3])
    one.tokens.append(UNKNOWN)
    found = describe(Plan([Slice(one, 3, 1)]), {one: 4}, CUT)
    assert found.ids.tolist() == [-5]


def test_missing_rows_see_one_token_of_the_reserved_block() -> None:
    one = sequence(0, [5, 6, 7], [3])
    found = describe(Plan([Slice(one, 2, 1)]), {}, CUT, padded=4)
    assert found.slots.tolist() == [14, 0, 0, 0]
    assert found.contexts.tolist() == [3, 1, 1, 1]
    assert [found.tables[start] for start in found.starts] == [3, 0, 0, 0]
    assert found.counts.tolist() == [1, 1, 1, 1]
    assert found.decodes == 4


@pytest.mark.parametrize("contexts", [[1], [100], [1, 8, 9, 500], [64] * 12])
def test_work_items_cover_every_context_once(contexts: list[int]) -> None:
    plan = Plan()
    for number, context in enumerate(contexts):
        blocks = list(range(1, 2 + context // 4))
        plan.decodes.append(Slice(sequence(number, [0] * context, blocks), context - 1, 1))
    found = describe(plan, {}, CUT)
    assert found.items.shape[1] <= len(contexts) + CUT.spread
    for index, context in enumerate(contexts):
        mine = found.items[:, found.items[0] == index]
        assert mine.shape[1] == found.counts[index]
        assert mine[3].tolist() == list(range(mine.shape[1]))
        seen = np.concatenate([np.arange(begin, end) for _, begin, end, _ in mine.T])
        assert seen.tolist() == list(range(context))
        assert not (mine[1] % CUT.columns).any()
