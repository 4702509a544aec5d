"""What penalties are computed from: counted token by token as if it were counted anew."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from penstock.wire import token_ids
from penstock.worker.engine.history import PromptHistories, TokenCounts, WindowCounts

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKENS = st.lists(st.integers(0, 5), max_size=90)


def counted(counts: TokenCounts) -> dict[int, int]:
    return dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))


@given(TOKENS, TOKENS, TOKENS, st.integers(1, 100))
def test_a_window_moves_over_prompt_and_answer(
    prompt: Sequence[int], at_once: Sequence[int], one_by_one: Sequence[int], window: int
) -> None:
    counts = WindowCounts(token_ids(prompt), window)
    answer = token_ids(at_once)
    for token in (None, *one_by_one):
        if token is not None:
            answer.append(token)
        counts.take(answer)
        latest = [*prompt, *answer][-window:]
        assert counted(counts) == Counter(latest)
        assert counts.ids.tolist() == counts.seen.tolist() == sorted(set(latest))


@given(TOKENS, TOKENS)
def test_without_a_window_the_prompt_is_only_seen(
    prompt: Sequence[int], answer: Sequence[int]
) -> None:
    counts = TokenCounts(PromptHistories().of(token_ids(prompt)))
    for end in range(len(answer) + 1):
        counts.take(token_ids(answer[:end]))
    assert counted(counts) == Counter(answer)
    assert set(counts.seen.tolist()) == {*prompt, *answer}
