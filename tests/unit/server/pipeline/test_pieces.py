"""Pieces of an answer: the same reasoning is counted however its tokens come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock import wire
from penstock.server.pipeline.pieces import AnswerReading, Piece
from penstock.text.parsing import Parse, Parsing, Source, plain
from penstock.text.reasoning import Tags, read_reasoning
from penstock.text.stream import TextStream

TAGS = Tags("<think>", "</think>")
WORDS = ["<th", "ink>", "well", ", so", "</thi", "nk>", "\n", "Yes", "."]


def answer(source: Source) -> Parse[None]:
    yield from read_reasoning(source, TAGS, opened=False)
    yield from plain(source)


class Words:
    """A tokenizer whose tokens are words."""

    decoder = SimpleNamespace(
        start=lambda: SimpleNamespace(push=lambda token: token, finish=lambda **_: "")
    )

    @staticmethod
    def token(number: int, **_: object) -> str:
        return WORDS[number]


def counted(sizes: list[int], finish: wire.Finish = wire.Finish.STOP) -> int:
    """Of the words, when they come so many at a time."""
    reading = AnswerReading(TextStream(cast("Any", Words())), Parsing(answer))
    total, at = 0, 0
    for size in sizes:
        tokens = list(range(at, at + size))
        at += size
        output = wire.Output(id=1, tokens=tokens, finish=finish if at == sum(sizes) else None)
        reading.absorb(Piece(0), output, [])
        total += reading.more_reasoning_tokens()
    return total


@pytest.mark.parametrize("sizes", [[1] * 9, [9], [2, 2, 2, 3], [5, 4], [4, 1, 4], [3, 6]])
def test_reasoning_is_counted_the_same_in_any_pieces(sizes: list[int]) -> None:
    assert counted(sizes) == 4  # from behind the first mark up to the end of the second


def test_an_answer_cut_in_its_reasoning_is_reasoning_to_its_end() -> None:
    assert counted([3, 2], wire.Finish.LENGTH) == 3
