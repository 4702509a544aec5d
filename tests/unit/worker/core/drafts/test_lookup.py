"""The index: what it finds is there, nothing nearer is missed, and it stays within its bytes."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from penstock.wire import token_ids
from penstock.worker.core.drafts.lookup import (
    INDEX_BYTES,
    MAX_MATCH,
    MIN_MATCH,
    Lookup,
    LookupIndex,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

FEW_KINDS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def longest(tokens: Sequence[int]) -> int:
    """By comparing with every place."""
    last = len(tokens) - 1
    lengths = [0]
    for place in range(last):
        length = 0
        while place >= length and tokens[place - length] == tokens[last - length]:
            length += 1
        lengths.append(min(length, MAX_MATCH))
    found = max(lengths)
    return found if found >= MIN_MATCH else 0


@given(FEW_KINDS, FEW_KINDS)
def test_a_match_is_one_and_the_longest_where_few_places_are_alike(
    prompt: list[int], answer: list[int]
) -> None:
    tokens = token_ids(prompt)
    index = LookupIndex(tokens)
    for token in answer:
        tokens.append(token)
        place, length = index.match()
        if length:
            assert place < len(tokens) - 1
            assert tokens[place + 1 - length : place + 1] == tokens[len(tokens) - length :]
        same = sum(list(tokens[i : i + 3]) == list(tokens[-3:]) for i in range(len(tokens) - 3))
        if same <= 8:  # more are not looked at
            assert length == longest(tokens)
        assert (length > 0) == (longest(tokens) > 0)


@given(st.integers(0, 1 << 30), st.integers(1, 300), st.integers(1, 6))
def test_an_index_made_at_once_is_that_made_token_by_token(
    seed: int, size: int, kinds: int
) -> None:
    chance = Random(seed)
    tokens = token_ids(chance.randrange(kinds) * 70_001 for _ in range(size))
    at_once, step_by_step, growing = LookupIndex(tokens), LookupIndex(tokens[:1]), tokens[:1]
    step_by_step._tokens = growing
    for token in tokens[1:]:
        growing.append(token)
        found = step_by_step.match()
    if size > 1:
        assert at_once.match()[1] <= found[1]  # who was asked before knows one place more
        assert at_once._previous == step_by_step._previous
        assert at_once._heads == step_by_step._heads


def test_what_was_matched_goes_on_though_newer_places_look_alike() -> None:
    """The ninth last place with the same three tokens is the one that is being copied."""
    source = [1, 2, 3, 90, 1, 2, 3, 91, 1, 2, 3, 92]
    tokens = token_ids([50, 51, 52, *source, *([1, 2, 3, 80] * 12), 50, 51, 52])
    index = LookupIndex(tokens)
    for expected in source:
        place, length = index.match()
        assert length and index.following(place, 1) == [expected]
        tokens.append(expected)


def test_what_runs_in_a_circle_is_continued_beyond_its_end() -> None:
    index = LookupIndex(token_ids([9, 1, 2, 3, 1, 2, 3, 1, 2, 3]))
    place, length = index.match()
    assert length == 6
    assert index.following(place, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_an_index_takes_no_more_bytes_than_are_booked_for_it() -> None:
    tokens = token_ids(Random(0).choices(range(50_000), k=300))
    index = LookupIndex(tokens)
    for count in (300, 1_000, 5_000, 70_000):
        tokens.extend(Random(count).choices(range(50_000), k=count - len(tokens)))
        index.match()
        held = index._heads.itemsize * len(index._heads) + index._previous.__sizeof__()
        assert held <= INDEX_BYTES * len(tokens) + (1 << 12)


def test_no_more_tokens_are_indexed_than_there_is_room_for() -> None:
    lookup = Lookup(most_tokens=100)
    one, other = token_ids([1, 2, 3] * 20), token_ids([4, 5, 6] * 20)
    assert lookup.propose(1, one, 4) is not None
    assert lookup.propose(2, other, 4) is None
    one.extend([1, 2, 3] * 20)
    assert lookup.propose(1, one, 4) is None  # it has grown beyond
    assert lookup.tokens <= 100
    lookup.forget(1)
    assert lookup.tokens == 0
    assert lookup.propose(2, other, 4) is not None
    lookup.forget(2)
    assert lookup.tokens == 0


def test_what_was_wrong_is_thought_less_of_and_longer_matches_apart() -> None:
    lookup = Lookup(1000)
    tokens = token_ids([1, 2, 3, 7, 1, 2, 3])
    first = lookup.propose(1, tokens, 4)
    assert first is not None and first.tokens == [7, 1, 2, 3]
    for _ in range(30):
        lookup.learn(1, first, right=0, known=1)
    second = lookup.propose(1, tokens, 4)
    assert second is not None
    assert second.confidences[0] < 0.1 < first.confidences[0]
    assert second.confidences[1:] == first.confidences[1:]  # nothing was said of these
    for number in (2, 3):
        other = lookup.propose(number, token_ids(tokens), 4)
        assert other is not None and other.confidences[0] < first.confidences[0]  # so of others
    for _ in range(30):
        lookup.learn(1, first, right=4, known=4)
    third = lookup.propose(1, tokens, 4)
    assert third is not None and min(third.confidences) > 0.7
    assert third.survivals(2) == [third.confidences[0], third.confidences[0] * third.confidences[1]]
