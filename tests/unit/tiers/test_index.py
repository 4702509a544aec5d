"""The index of block files: the order in which they go, its sums, and a listing taken over while
others ask and change."""

from __future__ import annotations

import threading
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.tiers.files import Found
from penstock.tiers.format import block_tag, model_digest, name_of
from penstock.tiers.index import Index, Totals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MODELS = [model_digest("one"), model_digest("two")]


def tag(number: int) -> bytes:
    return block_tag(MODELS[number % 2], number.to_bytes(16, "big"))


def found(number: int, used_ns: int, size: int = 100) -> Found:
    return Found(name_of(tag(number)), size, used_ns)


def in_order(index: Index) -> list[int]:
    """The numbers of all files, the first to go first; empties it."""
    order = []
    while (oldest := index.oldest()) is not None:
        order.append(int.from_bytes(oldest[0][8:], "big"))
        index.drop(oldest[0])
    return order


def meanwhile(listing: Sequence[Found], act: Callable[[], None]) -> Iterator[Found]:
    """The listing, in whose middle somebody else acts."""
    half = len(listing) // 2
    yield from listing[:half]
    act()
    yield from listing[half:]


def test_a_listing_is_taken_over_by_last_use_and_of_all_models() -> None:
    index = Index()
    others = [Found("usage", 5, 1), Found("x.part", 5, 1), Found(name_of(tag(9)), 5, 1, False)]
    index.replace([found(1, 30), found(2, 10), found(3, 20, size=7), *others])
    assert len(index) == 3 and tag(2) in index and tag(9) not in index
    assert index.totals(MODELS[1]) == Totals(2, 107)
    assert index.totals(MODELS[0]) == Totals(1, 100)
    assert index.oldest() == (tag(2), 10)
    assert in_order(index) == [2, 3, 1]
    assert index.totals(MODELS[1]) == Totals()


def test_many_files_are_in_order_whatever_pieces_they_are_sorted_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.tiers.index._RUN", 7)
    monkeypatch.setattr("penstock.tiers.index._CANDIDATES", 3)
    index = Index()
    index.replace(found(number, (number * 7919) % 1009) for number in range(1000))
    assert in_order(index) == sorted(range(1000), key=lambda number: (number * 7919) % 1009)


def test_what_was_used_since_it_was_marked_stays_so() -> None:
    index = Index()
    listing = [found(number, number) for number in range(4)]
    index.replace(listing)
    index.touch([tag(0), tag(1)])  # a chain: its end goes first
    index.replace(listing)
    assert [used[0] for used in index.take_touched(9)] == [tag(1), tag(0)]
    assert in_order(index) == [2, 3, 1, 0]


def test_what_changes_while_a_listing_is_taken_over_is_neither_lost_nor_brought_back() -> None:
    index = Index()
    listing = [found(number, number) for number in range(6)]
    index.replace(listing)

    def others_act() -> None:
        index.drop(tag(0))
        index.add(tag(7), 11)
        index.touch([tag(1)])
        index.used_elsewhere(tag(2), 1 << 62)
        index.drop(tag(5))
        index.add(tag(5), 13)

    index.replace(meanwhile(listing, others_act))
    assert tag(0) not in index
    assert index.totals(MODELS[1]) == Totals(4, 100 + 100 + 13 + 11)
    assert index.take_touched(9)[0][0] == tag(1)
    assert in_order(index) == [3, 4, 7, 1, 2, 5]


def test_a_listing_that_cannot_be_taken_over_changes_nothing() -> None:
    index = Index()
    index.replace([found(1, 1)])

    def out_of_memory() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        index.replace(meanwhile([found(2, 2), found(3, 3)], out_of_memory))
    assert index._meanwhile is None, "changes would be noted for ever"
    assert in_order(index) == [1]


def test_nobody_waits_while_a_listing_is_put_in_order() -> None:
    index = Index()
    answered: list[bool] = []

    class Asked(Found):
        """Whoever puts it in order lets another thread ask first."""

        @property
        def modified_ns(self) -> int:
            asking = threading.Thread(target=index.totals, args=(MODELS[0],), daemon=True)
            asking.start()
            asking.join(1.0)
            answered.append(not asking.is_alive())
            return 1

        @modified_ns.setter
        def modified_ns(self, value: int) -> None:
            pass

    index.replace([Asked(name_of(tag(1)), 1, 1), found(2, 2)])
    assert answered and all(answered)
    assert in_order(index) == [1, 2]


def test_a_file_costs_no_more_memory_than_planned() -> None:
    count = 20_000
    listing = [found(number, 10**18 + number, 10**6 + number) for number in range(count)]
    index = Index()
    tracemalloc.start()
    try:
        index.replace(listing)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used / count < 160


changes = st.lists(
    st.tuples(
        st.sampled_from(["add", "drop", "touch", "elsewhere", "postpone", "evict", "replace"]),
        st.integers(0, 9),
    ),
    max_size=60,
)


@given(changes)
def test_the_order_is_that_of_a_plain_list(acts: list[tuple[str, int]]) -> None:
    index = Index()
    order: list[int] = []  # the first to go first
    later = 1 << 61  # after any clock
    do: dict[str, Callable[[int], None]] = {
        "add": lambda n: index.add(tag(n), 100),
        "drop": lambda n: index.drop(tag(n)),
        "touch": lambda n: index.touch([tag(n)]),
        "elsewhere": lambda n: index.used_elsewhere(tag(n), later),
        "postpone": lambda n: index.postpone(tag(n)),
    }
    for act, number in acts:
        later += 1
        was_there = number in order
        if act == "evict":
            oldest = index.oldest()
            assert (oldest[0] if oldest else None) == (tag(order[0]) if order else None)
            if oldest:
                index.drop(tag(order.pop(0)))
            continue
        if act == "replace":
            index.take_touched(99)
            index.replace([found(n, later + place) for place, n in enumerate(order)])
            later += len(order)
            continue
        if was_there:
            order.remove(number)
        if act == "add" or (was_there and act != "drop"):
            order.append(number)
        do[act](number)
    assert sum(index.totals(model).files for model in MODELS) == len(order) == len(index)
    assert sum(index.totals(model).bytes for model in MODELS) == 100 * len(order)
    assert in_order(index) == order
