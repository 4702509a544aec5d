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

from penstock.testing.schemas import schemas
from penstock.text.grammar import Format, Grammar, check, checked_grammar
from penstock.text.parsing import Parsing
from penstock.text.parts import CallArguments, CallBegin, TextDelta, merged
from penstock.text.tools import DIALECTS
from penstock.text.tools.dialect import Marks, Tool
from penstock.wire import Sampling, Submit
from penstock.worker.engine.grammar import Grammars
from penstock.worker.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from penstock.text.tools.dialect import Dialect

STOP = 256
TOKENS = [bytes([value]) for value in range(256)] + [b"<stop>"]
_SPACE = b" \t\r\n"
# What ends a text argument, by the mark that a dialect's grammar has.
_ENDS = ("</parameter>", "</arg_value>", "<escape>", '<|"|>')


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENS, [STOP])


def _next(text: bytes, allowed: list[int], source: random.Random, end: bytes) -> int:
    """One of the tokens; what ends a text is liked, and finished once it is begun."""
    for size in range(len(end) - 1, 0, -1):
        if text.endswith(end[:size]) and end[size] in allowed:
            return end[size]
    wanted = [token for token in allowed if token not in _SPACE] or allowed
    closers = [token for token in wanted if token in b'"]}<)']
    return source.choice(closers if closers and source.random() < 0.5 else wanted)


def drawn(grammars: Grammars, grammar: str, source: random.Random, number: int) -> str:
    """A text that the grammar's masks allow; white space and long texts are not liked."""
    rules = json.loads(grammar)["grammars"][0]["lark_grammar"]
    end = next((end for end in _ENDS if json.dumps(end) in rules), "").encode()
    sequence = Sequence(Submit(number, [1], 9, Sampling(), [STOP], grammar=grammar), 0)
    grammars.add(sequence.request)
    while True:
        pending = grammars.begin([sequence])
        assert pending is not None
        masks = pending.result()
        assert not masks.failed
        bits = np.unpackbits(masks.bits[0].view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: len(TOKENS)]).tolist()
        assert allowed
        if STOP in allowed:
            break
        sequence.tokens.append(_next(bytes(sequence.tokens[1:]), allowed, source, end))
    grammars.remove(number)
    return bytes(sequence.tokens[1:]).decode()


def test_whatever_is_drawn_validates(grammars: Grammars) -> None:
    source = random.Random(5)
    for number, schema in enumerate(schemas(150)):
        text = drawn(grammars, checked_grammar(Format("json_schema", schema)), source, number)
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
    grammars: Grammars, dialect: Dialect
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
            check(text := grammar.text(), "tools")
            for _ in range(5):
                number += 1
                written = drawn(grammars, text, source, number)
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
