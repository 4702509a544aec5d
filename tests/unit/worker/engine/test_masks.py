"""Masks: what a grammar allows, when it begins, and the budget of reasoning."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock.text.grammar import Format, Grammar, body_of
from penstock.wire import Sampling, Submit, Thinking
from penstock.worker.engine.executor import Constraints
from penstock.worker.engine.grammar import Grammars, Masks, Vocabulary
from penstock.worker.engine.sampler import sample
from penstock.worker.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# One token per byte, some words, and three special tokens.
WORDS = [b"true", b'{"', b'":', b"ab"]
OPEN, CLOSE, STOP = 260, 261, 262
TOKENS = [bytes([value]) for value in range(256)] + WORDS + [b"<o>", b"<c>", b"<s>"]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENS, [OPEN, CLOSE, STOP])


def grammar_of(kind: Any, value: Any = None) -> str:
    grammar = Grammar()
    grammar.start = body_of(grammar, Format(kind, value))
    return grammar.text()


_numbers: Iterator[int] = iter(range(1, 1 << 30))


def sequence_of(
    grammars: Grammars, grammar: str | None = None, thinking: Thinking | None = None
) -> Sequence:
    request = Submit(
        next(_numbers), [1, 2], 99, Sampling(temperature=0), [STOP],
        grammar=grammar, thinking=thinking,
    )  # fmt: skip
    grammars.add(request)
    return Sequence(request, 0)


def masks_of(grammars: Grammars, *sequences: Sequence) -> Masks:
    pending = grammars.begin(list(sequences))
    assert pending is not None
    return pending.result()


def allowed(grammars: Grammars, sequence: Sequence) -> set[int] | None:
    """The tokens that may follow; None: any."""
    masks = masks_of(grammars, sequence)
    if not masks.rows:
        return None
    bits = np.unpackbits(masks.bits[0].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[: len(TOKENS)]).tolist())


def say(sequence: Sequence, text: bytes) -> None:
    sequence.tokens += list(text)


def test_only_what_keeps_the_form_is_allowed(grammars: Grammars) -> None:
    sequence = sequence_of(grammars, grammar_of("choice", ["ab", "ac", "true"]))
    assert allowed(grammars, sequence) == {ord("a"), ord("t"), 256, 259}
    say(sequence, b"a")
    assert allowed(grammars, sequence) == {ord("b"), ord("c")}
    say(sequence, b"c")
    assert allowed(grammars, sequence) == {STOP}


def test_an_answer_may_end_only_where_its_form_does(grammars: Grammars) -> None:
    sequence = sequence_of(grammars, grammar_of("regex", "a+b?"))
    assert allowed(grammars, sequence) == {ord("a"), 259}
    say(sequence, b"aa")
    assert allowed(grammars, sequence) == {ord("a"), ord("b"), 259, STOP}


def test_a_mask_is_asked_for_again_and_changes_nothing(grammars: Grammars) -> None:
    sequence = sequence_of(grammars, grammar_of("json_object"))
    say(sequence, b'{"a": 1')
    first = allowed(grammars, sequence)
    assert first == allowed(grammars, sequence)
    assert first is not None
    assert ord("}") in first
    assert STOP not in first


def test_requests_of_one_form_do_not_disturb_each_other(grammars: Grammars) -> None:
    text = grammar_of("regex", "ab*c")
    one, other = sequence_of(grammars, text), sequence_of(grammars, text)
    say(one, b"abbb")
    masks = masks_of(grammars, one, Sequence(Submit(0, [1], 9, Sampling()), 0), other)
    assert masks.rows == [0, 2]
    assert allowed(grammars, other) == {ord("a"), 259}


def test_a_grammar_begins_behind_the_reasoning(grammars: Grammars) -> None:
    thinking = Thinking([CLOSE], OPEN, open=True)
    sequence = sequence_of(grammars, grammar_of("choice", ["b"]), thinking)
    free = set(range(len(TOKENS))) - {STOP}
    assert allowed(grammars, sequence) == free
    say(sequence, b"b b b")
    assert allowed(grammars, sequence) == free
    sequence.tokens.append(CLOSE)
    assert allowed(grammars, sequence) == {ord("b")}


def test_the_model_may_choose_to_think(grammars: Grammars) -> None:
    thinking = Thinking([CLOSE], OPEN)
    sequence = sequence_of(grammars, grammar_of("choice", ["b"]), thinking)
    assert allowed(grammars, sequence) == {ord("b"), OPEN}
    sequence.tokens.append(OPEN)
    assert STOP not in (allowed(grammars, sequence) or set())
    sequence.tokens += [5, CLOSE]
    assert allowed(grammars, sequence) == {ord("b")}
    silent = sequence_of(grammars, grammar_of("choice", ["b"]), thinking)
    say(silent, b"b")
    assert allowed(grammars, silent) == {STOP}


@pytest.mark.parametrize("end", [[CLOSE], [7, 8, 9]])
def test_a_spent_budget_closes_the_reasoning(grammars: Grammars, end: list[int]) -> None:
    sequence = sequence_of(grammars, None, Thinking(end, open=True, budget=2))
    assert allowed(grammars, sequence) is None
    say(sequence, b"xy")
    for token in end:
        assert allowed(grammars, sequence) == {token}
        sequence.tokens.append(token)
    assert allowed(grammars, sequence) is None


def test_reasoning_that_ends_by_itself_is_left_alone(grammars: Grammars) -> None:
    sequence = sequence_of(grammars, None, Thinking([CLOSE], open=True, budget=2))
    sequence.tokens.append(CLOSE)
    say(sequence, b"a long answer")
    assert allowed(grammars, sequence) is None


def test_a_grammar_that_cannot_go_on_names_its_request(grammars: Grammars) -> None:
    sequence = sequence_of(grammars, grammar_of("choice", ["b"]))
    say(sequence, b"no")
    masks = masks_of(grammars, sequence)
    assert list(masks.failed) == [sequence.id]


def test_who_is_forgotten_is_free(grammars: Grammars) -> None:
    sequence = sequence_of(grammars, grammar_of("choice", ["b"]))
    grammars.remove(sequence.id)
    assert grammars.begin([sequence]) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_sampler_keeps_to_the_mask(grammars: Grammars, temperature: float) -> None:
    """Rows without one are sampled as if nobody had one."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, len(TOKENS), generator=generator)
    constrained = sequence_of(grammars, grammar_of("choice", ["ab", "true"]))
    free = [
        Sequence(Submit(-n, [1, 2], 9, Sampling(temperature=temperature, seed=n)), 0)
        for n in (1, 2)
    ]
    rows = [free[0], constrained, free[1]]
    masks = masks_of(grammars, *rows)
    before = logits.clone()
    tokens = sample(logits, rows, masks).tokens
    assert torch.equal(before, logits)
    assert tokens[1] in {ord("a"), ord("t"), 256, 259}
    assert [tokens[0], tokens[2]] == [
        sample(logits[[0]], [free[0]]).tokens[0],
        sample(logits[[2]], [free[1]]).tokens[0],
    ]


def test_random_walks_stay_within_a_schema(grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": [1]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    rng = np.random.default_rng(3)
    for _ in range(20):
        sequence = sequence_of(grammars, grammar_of("json_schema", schema))
        while (choices := allowed(grammars, sequence)) != {STOP}:
            assert choices
            best = sorted(choices - {32, 10, 13, 9, STOP}) or sorted(choices)
            sequence.tokens.append(int(rng.choice(best)))
        text = b"".join(TOKENS[token] for token in sequence.tokens[2:])
        value = json.loads(text)
        assert value["b"] == 1
        assert 0 <= value["a"] <= 99


def test_nothing_runs_while_the_vocabulary_is_read(starter_folder: Path) -> None:
    constraints = Constraints(Vocabulary(starter_folder, 49_152))
    assert not constraints.constrains
    assert constraints.prepare()
    assert constraints.constrains  # when it comes back, not some time later
    assert not constraints.prepare()
