"""The sampler: every way of choosing, on logits small enough to work out by hand."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.wire import LogitBias, Sampling, Submit, frame, to_worker, token_ids
from penstock.worker.core.shared_tokens import SharedTokens
from penstock.worker.engine.history import PromptHistories
from penstock.worker.engine.requests import RequestState
from penstock.worker.engine.sampler import Sampler, uniform

LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.9, -0.2]])
VOCABULARY = LOGITS.shape[1]
sampler = Sampler()
sample = sampler.sample


def sequence(
    output: list[int] | None = None,
    prompt: list[int] | None = None,
    stop: list[int] | None = None,
    min_tokens: int = 0,
    **how: Any,
) -> RequestState:
    if "logit_bias" in how:
        how["logit_bias"] = LogitBias.of(how["logit_bias"])
    request = Submit(
        0, prompt or [0], 100, Sampling(**how), stop_token_ids=stop or [], min_tokens=min_tokens
    )
    made = RequestState(request)
    made.extend(output or [])
    return made


def draws(count: int, logits: torch.Tensor = LOGITS, **how: Any) -> Counter[int]:
    """How often each token is drawn over `count` seeds, in batches."""
    found: Counter[int] = Counter()
    for first in range(0, count, 500):
        rows = [sequence(seed=seed, **how) for seed in range(first, min(first + 500, count))]
        found.update(sample(logits.expand(len(rows), -1).clone(), rows).tokens)
    return found


def test_greedy_takes_the_best_and_leaves_the_logits_alone() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    rows = [sequence(temperature=0, logit_bias={3: 100.0} if i == 2 else {}) for i in range(5)]
    tokens = sample(logits, rows).tokens
    expected = logits.argmax(-1).tolist()
    expected[2] = 3
    assert tokens == expected
    assert torch.equal(logits, before)


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_position() -> None:
    numbers = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    buckets = Counter(int(number * 10) for number in numbers)
    assert chi_square([buckets[b] for b in range(10)], [1000.0] * 10) < 27.9  # 9 degrees, p = 0.001


def chi_square(observed: list[int], expected: list[float]) -> float:
    return sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))


def test_draws_follow_the_distribution() -> None:
    count = 20_000
    found = draws(count, temperature=0.8)
    expected = (torch.softmax(LOGITS[0].double() / 0.8, -1) * count).tolist()
    assert min(expected) > 5
    observed = [found[token] for token in range(VOCABULARY)]
    assert chi_square(observed, expected) < 24.3  # 7 degrees of freedom, p = 0.001


def test_draws_of_one_stream_follow_the_distribution_too() -> None:
    count = 4_000
    found = Counter(
        sample(LOGITS.clone(), [sequence([1] * length, temperature=1.0, seed=5)]).tokens[0]
        for length in range(count)
    )
    expected = (torch.softmax(LOGITS[0].double(), -1) * count).tolist()
    assert chi_square([found[t] for t in range(VOCABULARY)], expected) < 24.3


@pytest.mark.parametrize(
    ("how", "warpers"),
    [
        ({"top_k": 1}, [TopKLogitsWarper(1)]),
        ({"top_k": 3}, [TopKLogitsWarper(3)]),
        ({"top_p": 0.5}, [TopPLogitsWarper(0.5)]),
        ({"top_p": 0.9}, [TopPLogitsWarper(0.9)]),
        ({"top_p": 1e-9}, [TopPLogitsWarper(1e-9)]),
        ({"min_p": 0.3}, [MinPLogitsWarper(0.3)]),
        ({"top_k": 4, "top_p": 0.8}, [TopKLogitsWarper(4), TopPLogitsWarper(0.8)]),
        (
            {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.2},
            [
                TemperatureLogitsWarper(1.5),
                TopKLogitsWarper(6),
                TopPLogitsWarper(0.9),
                MinPLogitsWarper(0.2),
            ],
        ),
    ],
)
def test_the_same_tokens_stay_possible_as_in_transformers(
    how: dict[str, Any], warpers: list[Any]
) -> None:
    scores = LOGITS.clone()
    for warper in warpers:
        scores = warper(torch.tensor([[0]]), scores)
    probabilities = torch.softmax(scores[0].double(), -1)
    found = draws(3_000, **{"temperature": 1.0, **how})
    possible = {token for token in range(VOCABULARY) if probabilities[token] > 0}
    assert set(found) == possible
    observed = [found[token] for token in sorted(possible)]
    expected = [3_000 * float(probabilities[token]) for token in sorted(possible)]
    assert chi_square(observed, expected) < 24.3  # at most 7 degrees of freedom


def test_settings_of_one_row_do_not_reach_another() -> None:
    rows = [
        sequence(temperature=1.0, top_k=1, seed=1),
        sequence(temperature=1.0, top_p=0.01, seed=2),
        sequence(temperature=0.0, logit_bias={5: 50.0}),
        sequence(temperature=1.0, seed=3),
        sequence(temperature=0.0),
    ]
    alone = [sample(LOGITS.clone(), [row]).tokens[0] for row in rows]
    assert sample(LOGITS.expand(5, -1).clone(), rows).tokens == alone
    assert alone[:3] == [0, 0, 5]


def test_a_seed_gives_the_same_token_whatever_else_is_in_the_batch() -> None:
    logits = torch.randn(30, 500, generator=torch.Generator().manual_seed(1))
    rows = [sequence([1] * i, temperature=1.0, top_p=0.9, seed=i % 4) for i in range(30)]
    together = sample(logits.clone(), rows).tokens
    alone = [sample(logits[i : i + 1].clone(), [rows[i]]).tokens[0] for i in range(30)]
    backwards = sample(logits.flip(0), rows[::-1]).tokens[::-1]
    assert together == alone == backwards
    other_seeds = [sequence([1] * i, temperature=1.0, top_p=0.9, seed=99) for i in range(30)]
    assert sample(logits.clone(), other_seeds).tokens != together


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-45, 1e-300])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = LOGITS * 1e4
    assert set(draws(100, logits, temperature=temperature)) == {0}


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = torch.full((1, 6), float("-inf"))
    logits[0, 2] = 0.0
    assert set(draws(500, logits, temperature=2.0)) == {2}


def test_a_row_of_nan_gives_a_token_of_the_vocabulary_and_leaves_the_others_alone() -> None:
    logits = LOGITS.expand(3, -1).clone()
    logits[1] = float("nan")
    rows = [sequence(temperature=1.0, seed=seed, top_p=0.9) for seed in range(3)]
    alone = [sample(LOGITS.clone(), [row]).tokens[0] for row in rows]
    tokens = sample(logits, rows).tokens
    assert 0 <= tokens[1] < VOCABULARY
    assert (tokens[0], tokens[2]) == (alone[0], alone[2])


def test_repetition_penalty_equals_transformers() -> None:
    prompt, output = [4, 0], [6, 6, 5]
    theirs = RepetitionPenaltyLogitsProcessor(2.5)(torch.tensor([prompt + output]), LOGITS.clone())
    row = sequence(output, prompt=prompt, temperature=0, repetition_penalty=2.5)
    assert sample(LOGITS.clone(), [row]).tokens == [int(theirs.argmax())] == [1]
    row = sequence(output, prompt=prompt, temperature=1.0, repetition_penalty=2.5, seed=3)
    plain = sequence(output, prompt=prompt, temperature=1.0, seed=3)
    for _ in range(200):
        row.extend(output)
        plain.extend(output)
        row.position = plain.position = row.prompt_tokens + len(row.answer)
        assert sample(LOGITS.clone(), [row]).tokens == sample(theirs.clone(), [plain]).tokens


def test_presence_counts_once_and_frequency_every_time_and_neither_the_prompt() -> None:
    # Token 0 leads by 0.1 over 6, and by 1.0 over 1.
    greedy = {"temperature": 0.0, "prompt": [0, 0, 0]}
    assert pick([], **greedy, presence_penalty=2.0) == 0
    assert pick([0], **greedy, presence_penalty=0.05) == 0
    assert pick([0], **greedy, presence_penalty=0.2) == 6
    assert pick([0, 0, 0], **greedy, presence_penalty=0.05) == 0
    assert pick([0, 0, 0], **greedy, frequency_penalty=0.05) == 6
    assert pick([0, 0, 6], **greedy, frequency_penalty=0.7) == 6  # 2 - 1.4, 1.9 - 0.7, 1
    assert pick([0, 6, 6], **greedy, frequency_penalty=0.7, presence_penalty=0.5) == 1
    assert pick([3], **greedy, presence_penalty=-2.0) == 0
    assert pick([3], **greedy, presence_penalty=-2.0, frequency_penalty=-0.1) == 3


def pick(output: list[int], **how: Any) -> int:
    return sample(LOGITS.clone(), [sequence(output, **how)]).tokens[0]


def test_bias_moves_and_forbids() -> None:
    assert pick([], temperature=0, logit_bias={1: 1.5}) == 1
    assert pick([], temperature=0, logit_bias={0: -100.0, 6: -100.0}) == 1
    assert 0 not in draws(500, temperature=1.0, logit_bias={0: -100.0})


def test_no_stop_token_before_min_tokens() -> None:
    assert pick([1], stop=[0, 6], min_tokens=2, temperature=0) == 1
    assert pick([1, 1], stop=[0, 6], min_tokens=2, temperature=0) == 0
    assert pick([1, 1], stop=[0, 6], min_tokens=2, temperature=0, logit_bias={3: 0.1}) == 0
    rows = [sequence([1], stop=[0, 6], min_tokens=2, temperature=1.0, seed=s) for s in range(300)]
    assert not {0, 6}.intersection(sample(LOGITS.expand(300, -1).clone(), rows).tokens)


def test_logprobs_are_the_models_own_log_softmax() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    scores = torch.log_softmax(logits, -1)
    rows = [
        sequence(temperature=0.7, seed=1, logprobs=2, logit_bias={9: 40.0}),
        sequence(temperature=0),
        sequence(temperature=0, logprobs=0),
    ]
    answer = sample(logits, rows)
    assert answer.logprobs[1] is None
    first, last = answer.logprobs[0], answer.logprobs[2]
    assert first is not None and last is not None
    # What the model thinks, not what the bias made of it.
    assert first.chosen.token == 9
    assert first.chosen.logprob == pytest.approx(float(scores[0, 9]))
    best = scores[0].topk(2)
    assert [c.token for c in first.top] == best.indices.tolist()
    assert [c.logprob for c in first.top] == pytest.approx(best.values.tolist())
    assert last.chosen.logprob == pytest.approx(float(scores[2].max()))
    assert last.top == []


def test_logprobs_of_given_tokens() -> None:
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(3))
    scores = torch.log_softmax(logits, -1)
    found = sampler.logprobs_of(logits, [3, 0, 19, 7], alternatives=100)
    assert [f.chosen.logprob for f in found] == pytest.approx(
        [float(scores[row, token]) for row, token in enumerate([3, 0, 19, 7])]
    )
    assert all(len(f.top) == 20 for f in found)


def test_only_allowed_tokens_are_chosen_row_by_row() -> None:
    allowed = token_ids([3, 5]).tobytes()
    rows = [sequence(temperature=0), sequence(temperature=0, allowed_ids=allowed)]
    assert sample(LOGITS.expand(2, -1).clone(), rows).tokens == [0, 3]
    assert set(draws(300, temperature=2.0, allowed_ids=allowed)) == {3, 5}


def test_biases_and_early_stops_of_many_rows_do_not_mix() -> None:
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(1))
    rows = [
        sequence(
            temperature=0,
            logit_bias={row % 40: 50.0, (row + 1) % 40: 60.0},
            stop=[(row + 1) % 40],
            min_tokens=row % 2,
        )
        for row in range(64)
    ]
    expected = [(row if row % 2 else row + 1) % 40 for row in range(64)]
    assert sample(logits, rows).tokens == expected


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=30),
    st.lists(st.lists(st.integers(0, 7), max_size=40), max_size=6),
)
def test_counts_of_tokens_are_those_of_a_new_count(
    prompt: list[int], answers: list[list[int]]
) -> None:
    row = sequence(prompt=prompt)
    for answer in answers:
        row.answer.extend(answer)
        known = row.counts
        assert set(known.seen.tolist()) == {*prompt, *row.answer}
        found = zip(known.ids.tolist(), known.counts.tolist(), strict=True)
        assert dict(found) == Counter(row.answer)


def test_penalties_of_many_choices_of_one_prompt_take_little() -> None:
    """What is not in it: four bytes for each place in the prompt and the answer."""
    count, prompt, answer = 64, token_ids(range(8000)), token_ids(range(4000, 5000))
    shared, histories = SharedTokens(), PromptHistories()
    how = Sampling(repetition_penalty=1.1)
    requests = [to_worker.decode(frame(Submit(0, prompt, 2000, how))[4:]) for _ in range(count)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        rows = []
        for request in requests:
            assert isinstance(request, Submit)
            request.prompt = shared.list(request.prompt)
            rows.append(RequestState(request, histories))
            rows[-1].extend(answer)
        for row in rows:
            assert len(row.counts.seen) == 9000
            row.extend([9000])
            assert len(row.counts.ids) == 1001
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held < 4 * len(prompt) + count * 16 * (len(answer) + 64)


def test_what_requests_say_of_tokens_is_packed() -> None:
    bias = LogitBias.of(dict.fromkeys(range(1024), 1.0))
    request = Submit(1, list(range(1000, 3000)), 9, Sampling(logit_bias=bias))
    arrived = to_worker.decode(frame(request)[4:])
    assert isinstance(arrived, Submit)
    assert list(arrived.prompt) == list(request.prompt)
    assert arrived.sampling == request.sampling
    assert len(bias.ids) + len(bias.values) == 8 * 1024
    assert sys.getsizeof(arrived.prompt) < 5 * 2000


def test_a_window_counts_the_latest_tokens_of_prompt_and_answer() -> None:
    # As in llama.cpp, where the prompt's tokens are penalised as the answer's are.
    greedy = {"temperature": 0.0, "prompt": [0, 0, 0]}
    assert pick([], **greedy, penalty_window=2, presence_penalty=0.2) == 6
    assert pick([3, 4], **greedy, penalty_window=2, presence_penalty=0.2) == 0
    assert pick([3], **greedy, penalty_window=2, frequency_penalty=0.2) == 6
    assert pick([3, 4], **greedy, penalty_window=2, repetition_penalty=2.0) == 0
    assert pick([3, 4], **greedy, penalty_window=3, repetition_penalty=2.0) == 6
