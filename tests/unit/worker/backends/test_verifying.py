"""Rows of drafts: which tokens count, and how each row's state is that of one row after another."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire import Candidate, Finish, Sampling, Submit, TokenLogprobs, token_ids
from penstock.worker.backends.verifying import ahead_of, take_verified, verified_rows
from penstock.worker.core.backend import StepResult
from penstock.worker.core.plan import Plan, Slice
from penstock.worker.core.sequence import Ended
from penstock.worker.engine.requests import RequestState
from penstock.worker.engine.sampler import Sampler, uniform
from penstock.worker.models.batch import build_batch

TABLE = (np.arange(1, 9, dtype=np.int32),)


def piece(number: int, start: int, drafts: list[int], rows: int = 1) -> Slice:
    made = Slice(number, start, token_ids([40 + number]), TABLE, rows, samples=True)
    return made.with_drafts(drafts, TABLE) if drafts else made


def test_rows_of_drafts_lie_behind_their_token_and_see_what_is_before_them() -> None:
    chunk = Slice(9, 2, token_ids([1, 2, 3]), TABLE, 1, samples=True)
    plan = Plan([piece(0, 6, [7, 8, 9]), piece(1, 3, [])], [chunk])
    assert (plan.tokens, plan.drafts, plan.chunk_tokens) == (8, 3, 3)
    shape = plan.shape
    assert (shape.tokens, shape.sequences, shape.context, shape.logit_rows) == (8, 3, 10, 6)
    assert list(plan.written(0, 4)) == [2, 3, 1, 1, 2]
    batch = build_batch(plan, 4, torch.device("cpu"))
    (group,) = batch.groups
    assert batch.input_ids.tolist() == [[40, 7, 8, 9, 41, 1, 2, 3]]
    assert batch.position_ids.tolist() == [[6, 7, 8, 9, 3, 2, 3, 4]]
    assert batch.logit_rows.tolist() == [0, 1, 2, 3, 4, 7]
    assert group.write_blocks.tolist() == [2, 2, 3, 3, 1, 1, 1, 2]
    assert (group.decodes, group.decode_contexts.tolist()) == (5, [7, 8, 9, 10, 4])
    assert group.decode_tables.tolist() == [[1, 2, 3]] * 4 + [[1, 0, 0]]
    assert group.chunks[0].row == 5
    assert group.decode_firsts is not None and group.decode_firsts.tolist() == [0, 4, 5]
    rows, samplers = verified_rows(plan)
    assert rows == [0, 1, 2, 3, 4, 5]
    assert [ahead for _, ahead in ahead_of(samplers)] == [0, 1, 2, 3, 0, 0]


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=4), st.booleans()), min_size=1))
def test_a_token_counts_while_the_drafts_before_it_are_those_that_were_sampled(
    asked: list[tuple[list[int], bool]],
) -> None:
    plan = Plan([piece(n, 5, drafts) for n, (drafts, _) in enumerate(asked)])
    _, samplers = verified_rows(plan)
    sampled = [(7 * n) % 3 for n in range(len(samplers))]
    scored = [asked[p.request_id][1] for p in samplers]
    scores = [
        TokenLogprobs(Candidate(token, -1.0), []) if wanted else None
        for token, wanted in zip(sampled, scored, strict=True)
    ]
    result = StepResult()
    take_verified(samplers, sampled, scores, result)
    first = 0
    for number, (drafts, wanted) in enumerate(asked):
        own = sampled[first : first + 1 + len(drafts)]
        first += len(own)
        expected = [own[0]]
        for draft, token in zip(drafts, own[1:], strict=True):
            if draft != expected[-1]:
                break
            expected.append(token)
        output = result.outputs[number]
        assert output.tokens == expected
        if wanted:
            assert [s.chosen.token for s in output.logprobs or []] == expected
        else:
            assert output.logprobs is None


def test_what_is_behind_the_end_is_cut_with_its_scores() -> None:
    result = StepResult()
    scores = [TokenLogprobs(Candidate(token, -1.0), []) for token in (1, 2, 3)]
    both = piece(0, 5, [1, 2])
    take_verified([both] * 3, [1, 2, 3], list(scores), result)
    result.outputs[0].accepted = 2
    result.end(0, Ended(Finish.STOP, 2))
    output = result.outputs[0]
    assert (output.tokens, output.logprobs, output.accepted) == ([1, 2], scores[:2], 1)
    assert output.finish is Finish.STOP


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=30),
    st.lists(st.integers(0, 5), max_size=90),
    st.lists(st.integers(0, 5), min_size=1, max_size=5),
    st.sampled_from([0, 3, 40]),
)
def test_a_branch_counts_what_the_sequence_would_after_its_drafts(
    prompt: list[int], answer: list[int], drafts: list[int], window: int
) -> None:
    how = Sampling(penalty_window=window, frequency_penalty=1.0)
    state = RequestState(Submit(0, token_ids(prompt), 100, how))
    state.extend(answer)
    branches = [state.branch(drafts[: n + 1]) for n in range(len(drafts))]
    for number, branch in enumerate(branches, 1):
        told = RequestState(Submit(0, token_ids(prompt), 100, how))
        told.extend([*answer, *drafts[:number]])
        assert (branch.position, branch.generated) == (told.position, told.generated)
        assert branch.is_branch and not told.is_branch
        assert dict(zip(branch.counts.ids, branch.counts.counts, strict=True)) == dict(
            zip(told.counts.ids, told.counts.counts, strict=True)
        )
        assert set(branch.counts.seen.tolist()) == set(told.counts.seen.tolist())
        assert branch.answer_from(0) == list(told.answer)
    assert Counter(state.answer) == Counter(answer)  # nothing of it stays
    expected = Counter([*prompt, *answer][-window:] if window else answer)
    assert dict(zip(state.counts.ids, state.counts.counts, strict=True)) == expected


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_branches_are_sampled_as_one_after_another(seed: int) -> None:
    """With all that depends on earlier tokens: numbers by position, penalties, early stops."""
    how = Sampling(temperature=1.3, seed=seed, repetition_penalty=1.7, presence_penalty=0.9)
    request = Submit(0, token_ids([1, 2, 3]), 100, how, stop_token_ids=[0], min_tokens=6)
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
    drafts = [4, 1, 0, 5]
    state = RequestState(request)
    state.extend([6, 6])
    rows = [state, *(state.branch(drafts[: n + 1]) for n in range(4))]
    together = Sampler().sample(logits, rows).tokens
    one_by_one = []
    for row in range(5):
        told = RequestState(request)
        told.extend([6, 6, *drafts[:row]])
        one_by_one += Sampler().sample(logits[row : row + 1], [told]).tokens
    assert together == one_by_one
    assert len({uniform(seed, row.position) for row in rows}) == 5
