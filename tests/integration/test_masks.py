"""Masks: what a grammar allows, when it begins, and the budget of reasoning."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from msgspec import structs

from penstock.errors import BadRequest
from penstock.testing.grammar_hosts import BOUNDS, LocalHost, signal_matchers
from penstock.text.grammars.grammar import Format, Grammar, body_of
from penstock.wire import Sampling, Submit, Thinking
from penstock.worker.engine.grammar import Grammars, Masks
from penstock.worker.engine.requests import RequestState
from penstock.worker.engine.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator

# One token per byte, some words, and three special tokens.
WORDS = [b"true", b'{"', b'":', b"ab"]
OPEN, CLOSE, STOP = 260, 261, 262
TOKENS = [bytes([value]) for value in range(256)] + WORDS + [b"<o>", b"<c>", b"<s>"]


class Held(Grammars):
    """Grammars with a host of their own, who are asked as an engine asks."""

    def __init__(self, host: LocalHost) -> None:
        super().__init__(len(TOKENS), host.worker_end)
        self.host = host

        self.numbers: list[int] = []

    def add(self, request: Submit) -> None:
        super().add(request)
        self.numbers.append(request.id)

    def remove_all(self) -> None:
        for number in self.numbers:
            self.remove(number)

    def wait_until_ready(self, number: int) -> None:
        deadline = time.monotonic() + 30
        while not self.ready(number):
            assert time.monotonic() < deadline
            self.poll(0.05)


@pytest.fixture(scope="module")
def grammars() -> Iterator[Held]:
    with LocalHost.of_tokens(TOKENS, [OPEN, CLOSE, STOP]) as host:
        held = Held(host)
        yield held
        held.remove_all()


def grammar_of(kind: Any, value: Any = None) -> str:
    grammar = Grammar()
    grammar.start = body_of(grammar, Format(kind, value))
    return grammar.text()


_numbers: Iterator[int] = iter(range(1, 1 << 30))


def sequence_of(
    grammars: Held, grammar: str | None = None, thinking: Thinking | None = None
) -> RequestState:
    request = Submit(
        next(_numbers), [1, 2], 99, Sampling(temperature=0), [STOP],
        grammar=None if grammar is None else grammars.host.key(grammar), thinking=thinking,
    )  # fmt: skip
    grammars.add(request)
    grammars.wait_until_ready(request.id)
    return RequestState(request)


def masks_of(grammars: Held, *sequences: RequestState) -> Masks:
    assert grammars.begin(list(sequences))
    masks = grammars.collect(30)
    assert masks.failed or not masks.late
    return masks


def allowed(grammars: Held, sequence: RequestState) -> set[int] | None:
    """The tokens that may follow; None: any."""
    masks = masks_of(grammars, sequence)
    if not masks.rows:
        return None
    bits = np.unpackbits(masks.bits[0].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[: len(TOKENS)]).tolist())


def say(sequence: RequestState, text: bytes) -> None:
    sequence.extend(list(text))


def test_only_what_keeps_the_form_is_allowed(grammars: Held) -> None:
    sequence = sequence_of(grammars, grammar_of("choice", ["ab", "ac", "true"]))
    assert allowed(grammars, sequence) == {ord("a"), ord("t"), 256, 259}
    say(sequence, b"a")
    assert allowed(grammars, sequence) == {ord("b"), ord("c")}
    say(sequence, b"c")
    assert allowed(grammars, sequence) == {STOP}


def test_an_answer_may_end_only_where_its_form_does(grammars: Held) -> None:
    sequence = sequence_of(grammars, grammar_of("regex", "a+b?"))
    assert allowed(grammars, sequence) == {ord("a"), 259}
    say(sequence, b"aa")
    assert allowed(grammars, sequence) == {ord("a"), ord("b"), 259, STOP}


def test_a_mask_is_asked_for_again_and_changes_nothing(grammars: Held) -> None:
    sequence = sequence_of(grammars, grammar_of("json_object"))
    say(sequence, b'{"a": 1')
    first = allowed(grammars, sequence)
    assert first == allowed(grammars, sequence)
    assert first is not None
    assert ord("}") in first
    assert STOP not in first


def test_requests_of_one_form_do_not_disturb_each_other(grammars: Held) -> None:
    text = grammar_of("regex", "ab*c")
    one, other = sequence_of(grammars, text), sequence_of(grammars, text)
    say(one, b"abbb")
    masks = masks_of(grammars, one, RequestState(Submit(0, [1], 9, Sampling())), other)
    assert masks.rows == [0, 2]
    assert allowed(grammars, other) == {ord("a"), 259}


def test_a_grammar_begins_behind_the_reasoning(grammars: Held) -> None:
    thinking = Thinking([CLOSE], OPEN, open=True)
    sequence = sequence_of(grammars, grammar_of("choice", ["b"]), thinking)
    free = set(range(len(TOKENS))) - {STOP}
    assert allowed(grammars, sequence) == free
    say(sequence, b"b b b")
    assert allowed(grammars, sequence) == free
    sequence.extend([CLOSE])
    assert allowed(grammars, sequence) == {ord("b")}


def test_the_model_may_choose_to_think(grammars: Held) -> None:
    thinking = Thinking([CLOSE], OPEN)
    sequence = sequence_of(grammars, grammar_of("choice", ["b"]), thinking)
    assert allowed(grammars, sequence) == {ord("b"), OPEN}
    sequence.extend([OPEN])
    assert STOP not in (allowed(grammars, sequence) or set())
    sequence.extend([5, CLOSE])
    assert allowed(grammars, sequence) == {ord("b")}
    silent = sequence_of(grammars, grammar_of("choice", ["b"]), thinking)
    say(silent, b"b")
    assert allowed(grammars, silent) == {STOP}


@pytest.mark.parametrize("end", [[CLOSE], [7, 8, 9]])
def test_a_spent_budget_closes_the_reasoning(grammars: Held, end: list[int]) -> None:
    sequence = sequence_of(grammars, None, Thinking(end, open=True, budget=2))
    assert allowed(grammars, sequence) is None
    say(sequence, b"xy")
    for token in end:
        assert allowed(grammars, sequence) == {token}
        sequence.extend([token])
    assert allowed(grammars, sequence) is None


def test_reasoning_that_ends_by_itself_is_left_alone(grammars: Held) -> None:
    sequence = sequence_of(grammars, None, Thinking([CLOSE], open=True, budget=2))
    sequence.extend([CLOSE])
    say(sequence, b"a long answer")
    assert allowed(grammars, sequence) is None


def test_a_grammar_that_cannot_go_on_names_its_request(grammars: Held) -> None:
    sequence = sequence_of(grammars, grammar_of("choice", ["b"]))
    say(sequence, b"no")
    masks = masks_of(grammars, sequence)
    assert list(masks.failed) == [sequence.id]


def test_a_form_that_no_text_has_says_so(grammars: Held) -> None:
    sequence = sequence_of(grammars, grammar_of("regex", "[^\\s\\S]"))
    [why] = masks_of(grammars, sequence).failed.values()
    assert why == "no text that begins like this answer has that form"


def test_who_is_forgotten_is_free(grammars: Held) -> None:
    sequence = sequence_of(grammars, grammar_of("choice", ["b"]))
    grammars.remove(sequence.id)
    assert not grammars.begin([sequence])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_sampler_keeps_to_the_mask(grammars: Held, temperature: float) -> None:
    """Rows without one are sampled as if nobody had one."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, len(TOKENS), generator=generator)
    constrained = sequence_of(grammars, grammar_of("choice", ["ab", "true"]))
    free = [
        RequestState(Submit(-n, [1, 2], 9, Sampling(temperature=temperature, seed=n)))
        for n in (1, 2)
    ]
    rows = [free[0], constrained, free[1]]
    masks = masks_of(grammars, *rows)
    before = logits.clone()
    tokens = Sampler().sample(logits, rows, masks).tokens
    assert torch.equal(before, logits)
    assert tokens[1] in {ord("a"), ord("t"), 256, 259}
    assert [tokens[0], tokens[2]] == [
        Sampler().sample(logits[[0]], [free[0]]).tokens[0],
        Sampler().sample(logits[[2]], [free[1]]).tokens[0],
    ]


def test_random_walks_stay_within_a_schema(grammars: Held) -> None:
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
            sequence.extend([int(rng.choice(best))])
        text = b"".join(TOKENS[token] for token in sequence.answer)
        value = json.loads(text)
        assert value["b"] == 1
        assert 0 <= value["a"] <= 99


def say_all(grammars: Held, sequence: RequestState, text: bytes) -> None:
    """Token by token, as a model would."""
    for value in text:
        assert value in (allowed(grammars, sequence) or {value})
        say(sequence, bytes([value]))


def test_a_matcher_that_was_killed_is_replaced_and_given_the_same_tokens(grammars: Held) -> None:
    sequence = sequence_of(grammars, grammar_of("json_object"))
    say_all(grammars, sequence, b'{"a": [1, "b')
    before = allowed(grammars, sequence)
    say(sequence, b'"')
    signal_matchers(grammars.host, signal.SIGKILL)
    other = sequence_of(grammars, grammar_of("json_object"))
    say_all(grammars, other, b'{"a": [1, "b')
    assert allowed(grammars, other) == before
    assert allowed(grammars, sequence) == {ord(c) for c in ",]"}
    say_all(grammars, sequence, b"]}")
    assert STOP in (allowed(grammars, sequence) or set())


def test_who_has_no_mask_in_time_sits_out_and_goes_on_when_it_is_there(grammars: Held) -> None:
    sequence = sequence_of(grammars, grammar_of("regex", "a+"))
    signal_matchers(grammars.host, signal.SIGSTOP)
    assert grammars.begin([sequence])
    masks = grammars.collect(0.01)
    assert masks.late == {0} and not masks.rows and not masks.failed
    assert sequence.id in grammars.held and grammars.waits
    signal_matchers(grammars.host, signal.SIGCONT)
    deadline = time.monotonic() + 30
    while sequence.id in grammars.held:
        assert time.monotonic() < deadline
        grammars.poll(0.05)
    assert allowed(grammars, sequence) == {ord("a")}


def test_a_request_whose_matcher_dies_again_and_again_fails_alone(
    grammars: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A new matcher is asked here only once it is stopped: it might have answered before.
    monkeypatch.setattr(grammars, "_ask_all", lambda _: None)
    text = grammar_of("regex", "b+")
    sequence, other = sequence_of(grammars, text), sequence_of(grammars, text)
    for _ in range(2):
        grammars.wait_until_ready(sequence.id)
        signal_matchers(grammars.host, signal.SIGSTOP)
        assert grammars.begin([sequence])
        assert not grammars.collect(0.0).failed
        signal_matchers(grammars.host, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while grammars.ready(sequence.id) and not grammars.failure(sequence.id):
            assert time.monotonic() < deadline
            grammars.poll(0.05)
    assert "memory.grammars" in grammars.failure(sequence.id)
    assert not grammars.failure(other.id)
    grammars.remove(sequence.id)
    grammars.wait_until_ready(other.id)
    assert allowed(grammars, other) == {ord("b")}


def test_without_a_host_a_form_is_refused_and_reasoning_is_bounded() -> None:
    alone = Grammars(len(TOKENS))
    with pytest.raises(BadRequest, match="cannot be constrained"):
        alone.add(Submit(1, [1], 9, Sampling(), grammar=b"key"))
    request = Submit(2, [1], 9, Sampling(), thinking=Thinking([CLOSE], open=True, budget=0))
    alone.add(request)
    assert alone.ready(2)
    assert alone.begin([RequestState(request)])
    assert alone.collect().rows == [0]


def test_matchers_that_grow_beyond_the_room_take_turns() -> None:
    """Two at a time have room; the others wait, and all come to their end."""
    mib = 1 << 20
    bounds = structs.replace(BOUNDS, total_bytes=12 * mib, one_bytes=9 * mib, quick_bytes=9 * mib)
    with LocalHost.of_tokens(TOKENS, [OPEN, CLOSE, STOP], bounds) as host:
        grammars = Held(host)
        words = [f"{'a' * n}b" for n in range(1, 7)]
        keys = {word: host.key(grammar_of("choice", [word])) for word in words}
        sequences = {}
        for word, key in keys.items():
            request = Submit(next(_numbers), [1], 99, Sampling(), [STOP], grammar=key)
            grammars.add(request)
            sequences[word] = RequestState(request)
        deadline = time.monotonic() + 60
        while sequences:
            assert time.monotonic() < deadline
            grammars.poll(0.05)
            for word, sequence in list(sequences.items()):
                if grammars.ready(sequence.id):
                    assert allowed(grammars, sequence) is not None
                    grammars.remove(sequence.id)
                    del sequences[word]
        assert host.wanted, "some had to go and come back"
