"""Answers held to generated schemas, with dice for a model: whatever is drawn must validate.

`tests/proof` has the same on the real model.
"""

from __future__ import annotations

import json
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest

from penstock.testing.grammar_hosts import LocalHost, checked_grammar
from penstock.testing.schemas import bounds_texts, schemas
from penstock.testing.tokenizers import byte_level
from penstock.text.chat_format import ChatFormat, OutputSpec, Thinking, ToolUse
from penstock.text.grammars.grammar import Format, Grammar
from penstock.text.parsing import Parsing
from penstock.text.parts import CallArguments, CallBegin, CallEnd, TextDelta, merged
from penstock.text.tools import DIALECTS
from penstock.text.tools.dialect import Marks, Tool
from penstock.wire import Sampling, Submit
from penstock.worker.engine.grammar import Grammars
from penstock.worker.engine.requests import RequestState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.text.tools.dialect import Dialect

STOP = 256
TOKENS = [bytes([value]) for value in range(256)] + [b"<stop>"]
_SPACE = b" \t\r\n"
# What ends a text argument, by the mark that a dialect's grammar has.
_ENDS = ("</parameter>", "</arg_value>", "<escape>", '<|"|>')


@pytest.fixture(scope="module")
def host() -> Iterator[LocalHost]:
    with LocalHost.of_tokens(TOKENS, [STOP]) as host:
        yield host


@pytest.fixture(scope="module")
def grammars(host: LocalHost) -> Grammars:
    return Grammars(len(TOKENS), host.worker_end)


def _next(text: bytes, allowed: list[int], source: random.Random, end: bytes) -> int:
    """One of the tokens; what ends a text is liked, and finished once it is begun."""
    for size in range(len(end) - 1, 0, -1):
        if text.endswith(end[:size]) and end[size] in allowed:
            return end[size]
    wanted = [token for token in allowed if token not in _SPACE] or allowed
    closers = [token for token in wanted if token in b'"]}<)']
    return source.choice(closers if closers and source.random() < 0.5 else wanted)


def drawn(
    grammars: Grammars, host: LocalHost, grammar: str, source: random.Random, number: int
) -> str:
    """A text that the grammar's masks allow; white space and long texts are not liked."""
    return drawn_and_next(grammars, host, grammar, source, number)[0]


def drawn_and_next(
    grammars: Grammars, host: LocalHost, grammar: str, source: random.Random, number: int
) -> tuple[str, list[int]]:
    """The same, and what might follow it."""
    rules = json.loads(grammar)["grammars"][0]["lark_grammar"]
    end = next((end for end in _ENDS if json.dumps(end) in rules), "").encode()
    sequence = RequestState(Submit(number, [1], 9, Sampling(), [STOP], grammar=host.key(grammar)))
    grammars.add(sequence.request)
    while True:
        assert grammars.begin([sequence])
        masks = grammars.collect(30)
        assert not masks.failed
        bits = np.unpackbits(masks.bits[0].view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: len(TOKENS)]).tolist()
        assert allowed
        if STOP in allowed:
            break
        sequence.extend([_next(bytes(list(sequence.answer)), allowed, source, end)])
    grammars.remove(number)
    return bytes(list(sequence.answer)).decode(), allowed


def test_whatever_is_drawn_validates(grammars: Grammars, host: LocalHost) -> None:
    source = random.Random(5)
    for number, schema in enumerate(schemas(150)):
        text = drawn(grammars, host, checked_grammar(Format("json_schema", schema)), source, number)
        jsonschema.validate(json.loads(text), schema)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "deep": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    Tool("weather", {"type": "function", "function": {"name": "weather"}}, SCHEMA),
    Tool("time", {"type": "function", "function": {"name": "time"}}, {"properties": {}}),
]
TEMPLATES = {"deepseek": ("", "```json"), "mistral": ("", "[ARGS]"), "gemma": ("", "<|tool_call>")}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_calls_that_the_grammar_allows_are_read_as_valid_calls(
    grammars: Grammars, host: LocalHost, dialect: Dialect
) -> None:
    """Both sides of a dialect agree: what its grammar writes its parser understands."""
    source = random.Random(7)
    number = 10_000
    for template in TEMPLATES.get(dialect.name, ("",)):
        for most in (1, 3):
            marks = Marks(lambda _: None)
            grammar = Grammar()
            rule = dialect.calls(grammar, TOOLS, most, marks, template)
            grammar.start = f"{marks(rule.trigger)} {rule.after}"
            text = grammar.text()
            for _ in range(5):
                number += 1
                written = drawn(grammars, host, text, source, number)
                parsing = Parsing(partial(dialect.parse, tools=TOOLS))
                parts = merged([*parsing.push(written), *parsing.finish()])
                names = [part.name for part in parts if isinstance(part, CallBegin)]
                arguments = [part.text for part in parts if isinstance(part, CallArguments)]
                said = "".join(part.text for part in parts if isinstance(part, TextDelta))
                assert not said.strip(), written
                assert 1 <= len(names) == len(arguments) <= most, written
                for name, content in zip(names, arguments, strict=True):
                    schema = SCHEMA if name == "weather" else {"type": "object"}
                    jsonschema.validate(json.loads(content), schema)


class LettersOnly(ChatFormat):
    """A model none of whose marks is a token: masks of bytes can say all of it."""

    def _special(self, token: str) -> None:
        return None


def forced(dialect: Dialect, use: ToolUse) -> OutputSpec:
    return LettersOnly(byte_level(), "", dialect).answer("", use, None, Thinking())


ONLY = {
    "named": ToolUse(tuple(TOOLS), required=True, name="weather"),
    "not parallel": ToolUse(tuple(TOOLS), required=True, parallel=False),
}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("choice", ONLY)
def test_a_call_that_must_be_the_only_one_ends_the_answer(
    grammars: Grammars, host: LocalHost, dialect: Dialect, choice: str
) -> None:
    plan = forced(dialect, ONLY[choice])
    assert plan.grammar is not None
    source = random.Random(11)
    for number in range(20_000, 20_005):
        written, following = drawn_and_next(grammars, host, plan.grammar.text, source, number)
        assert following == [STOP], written
        parsing = Parsing(plan.parser)
        parts = merged([*parsing.push(written), *parsing.finish()])
        kinds = [type(part) for part in parts]
        assert kinds == [CallBegin, CallArguments, CallEnd], written
        assert isinstance(parts[0], CallBegin)
        assert parts[0].name == "weather" or choice != "named"


FAVOURITES = b"1 \n-x[{"


def repeating(grammars: Grammars, host: LocalHost, grammar: str, favourite: int, most: int) -> str:
    """What a model writes that likes one character above all, and must not go on for ever."""
    sequence = RequestState(Submit(30_000, [1], 9, Sampling(), [STOP], grammar=host.key(grammar)))
    grammars.add(sequence.request)
    while STOP not in sequence.answer[-1:]:
        assert len(sequence.answer) < most, bytes(list(sequence.answer)).decode(errors="replace")
        assert grammars.begin([sequence])
        bits = np.unpackbits(grammars.collect(30).bits[0].view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: len(TOKENS)]).tolist()
        sequence.extend([favourite if favourite in allowed else allowed[-1]])
    grammars.remove(30_000)
    return bytes(list(sequence.answer[:-1])).decode(errors="replace")


LONG = Tool(
    "note",
    {"type": "function", "function": {"name": "note"}},
    {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}},
        "required": ["text", "n"],
    },
)
UNTYPED = Tool(
    "note",
    LONG.definition,
    {
        "type": "object",
        "properties": {
            "a": {},
            "b": {"description": "anything"},
            "c": {"type": "object"},
            "d": {"type": "array"},
            "e": {"type": "integer", "maximum": 2**53 - 1},
            "f": {"type": "number", "default": 1e30},
            "g": {"type": "object", "properties": {"x": {}}, "additionalProperties": True},
        },
        "required": ["a", "b", "c", "d", "e", "f", "g"],
        "additionalProperties": True,
    },
)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize(
    ("tool", "favourites"), [(LONG, FAVOURITES), (UNTYPED, b"1-.")], ids=["typed", "untyped"]
)
def test_arguments_cannot_be_longer_than_their_schema_lets_them(
    grammars: Grammars, host: LocalHost, dialect: Dialect, tool: Tool, favourites: bytes
) -> None:
    """A model that repeats itself comes to an end: every answer has a longest form."""
    plan = forced(dialect, ToolUse((tool,), required=True, name="note"))
    assert plan.grammar is not None
    for favourite in favourites:
        repeating(grammars, host, plan.grammar.text, favourite, 500)


def test_what_a_schema_bounds_ends_whatever_the_model_repeats(
    grammars: Grammars, host: LocalHost
) -> None:
    bounded = [schema for schema in schemas(60, seed=1) if bounds_texts(schema)]
    assert len(bounded) > 50
    for schema in bounded:
        grammar = checked_grammar(Format("json_schema", schema))
        for favourite in FAVOURITES:
            text = repeating(grammars, host, grammar, favourite, 1500)
            jsonschema.validate(json.loads(text), schema)
