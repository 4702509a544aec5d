"""Answers that are cut short, in every dialect: no half mark-up, no call that seems whole."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.testing.tool_calls import EXAMPLES, FRAGMENTS, HARMONY, TOOLS
from penstock.text.parsing import Parsing
from penstock.text.parts import CallArguments, CallBegin, CallEnd, ReasoningDelta, TextDelta, merged
from penstock.text.tools import DIALECTS, by_name

if TYPE_CHECKING:
    from penstock.text.parts import Part
    from penstock.text.tools.dialect import Dialect

ALL = [*((name, text, before) for name, text, before, _ in EXAMPLES), ("harmony", HARMONY, "")]


fragments = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=2)), max_size=14)


def dialect_of(name: str) -> Dialect:
    dialect = by_name(name)
    assert dialect is not None
    return dialect


def text_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextDelta))


def parsed_cut(dialect: Dialect, pieces: list[str]) -> list[Part]:
    parsing = Parsing(partial(dialect.parse, tools=TOOLS))
    parts = [part for piece in pieces for part in parsing.push(piece)]
    return merged([*parts, *parsing.finish(cut=True)])


def made(parts: list[Part]) -> list[tuple[str, str, bool]]:
    """Name, arguments as written, and whether the call came to its end."""
    calls: list[tuple[str, str, bool]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            calls.append((part.name, "", False))
        elif isinstance(part, CallArguments | CallEnd):
            name, arguments, ended = calls[-1]
            assert not ended
            more = part.text if isinstance(part, CallArguments) else ""
            calls[-1] = (name, arguments + more, isinstance(part, CallEnd))
    return calls


@pytest.mark.parametrize(("name", "text", "before"), ALL)
def test_wherever_a_call_is_cut_nothing_of_its_marks_is_text(
    name: str, text: str, before: str
) -> None:
    dialect = dialect_of(name)
    [*whole] = made(parsed_cut(dialect, [text]))
    begun = 0
    for size in range(len(text) + 1):
        parts = parsed_cut(dialect, [text[:size]])
        assert parts == parsed_cut(dialect, list(text[:size])), text[:size]
        assert before.startswith(text_of(parts).rstrip("\n ")), text[:size]
        calls = made(parts)
        assert len(calls) >= begun, text[:size]
        begun = len(calls)
        for (called, arguments, ended), (expected, full, _) in zip(calls, whole, strict=False):
            assert called == expected
            assert full.startswith(arguments)
            if ended:
                assert json.loads(arguments) == json.loads(full)
            else:
                assert called == calls[-1][0]  # only the last may be open
    assert begun == len(whole) == (1 if name == "harmony" else 2)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", 'Hm.\n<tool_call>\n{"name": "wea', [TextDelta("Hm.\n")]),
        ("hermes", '<tool_call>\n{"name": "weather", "arg', [CallBegin("weather")]),
        ("hermes", "if a <", [TextDelta("if a ")]),
        ("hermes", "a <b> c", [TextDelta("a <b> c")]),
        ("llama_json", '{"answer": [4', [TextDelta('{"answer": [4')]),
        ("llama_json", '{"name": "nobody", "x', [TextDelta('{"name": "nobody", "x')]),
        ("llama_json", '{"name": "wea', []),
        ("llama_json", '{"parameters": {"city": "P', []),
        ("llama_json", '{ "name" : "weather"', [CallBegin("weather")]),
        ("pythonic", "[1, 2", [TextDelta("[1, 2")]),
        ("pythonic", "[wea", []),
        ("pythonic", '[weather(city="Pa', [CallBegin("weather")]),
        ("pythonic", '[nobody(city="Pa', [TextDelta('[nobody(city="Pa')]),
        ("gemma", "<start_function_call>call:weather{city:<esc", [CallBegin("weather")]),
        ("harmony", "Just text", [TextDelta("Just text")]),
        ("harmony", "<|channel|>fin", []),
        ("harmony", "<|channel|>commentary to=functions.weat", []),
        ("harmony", "<|channel|>commentary to=functions.weather <|con", [CallBegin("weather")]),
        ("harmony", "<|channel|>analysis<|message|>Hm<|e", [ReasoningDelta("Hm")]),
        (
            "harmony",
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assis",
            [ReasoningDelta("Hm")],
        ),
    ],
)
def test_what_is_left_of_a_cut_answer(name: str, text: str, expected: list[Part]) -> None:
    assert parsed_cut(dialect_of(name), [text]) == expected
    assert parsed_cut(dialect_of(name), list(text)) == expected


@given(pieces=fragments)
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_how_a_cut_answer_came_does_not_matter(dialect: Dialect, pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = parsed_cut(dialect, [text])
    assert whole == parsed_cut(dialect, list(text))
    assert whole == parsed_cut(dialect, [text[:17], text[17:]])
    made(whole)
