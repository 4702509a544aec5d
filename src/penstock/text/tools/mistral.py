"""Mistral: one token opens the calls; older models write a list, newer ones name and arguments.

[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]
[TOOL_CALLS]weather[ARGS]{"city": "Paris"}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.text.parts import TextDelta
from penstock.text.tools.dialect import CallRule, Marks, Tool, json_call, repeated
from penstock.text.tools.json_call import object_rule, read_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.text.grammars.grammar import Grammar
    from penstock.text.parsing import Parse, Source

OPEN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class Mistral:
    """A list of JSON objects, or names with arguments."""

    name = "mistral"
    visible = (OPEN, ARGUMENTS, CALL_ID)

    def taught_by(self, template: str) -> bool:
        """The token is its mark."""
        return OPEN in template

    def parse(self, source: Source, tools: Sequence[Tool]) -> Parse[None]:
        """Both forms."""
        while (yield from source.until(TextDelta, OPEN)) is not None:
            source.mark()
            yield from source.space()
            if (yield from source.accept("[")):
                opened = OPEN + source.since_mark()
                yield from _list(source, opened)
            elif not (yield from _named(source)):
                yield TextDelta(OPEN + source.since_mark())

    def calls(
        self, grammar: Grammar, tools: Sequence[Tool], most: int, marks: Marks, template: str
    ) -> CallRule:
        """The form that the template has."""
        if ARGUMENTS not in template:
            call = object_rule(grammar, tools, "arguments")
            return CallRule(OPEN, f"{marks('[')} {repeated(call, most, marks(', '))} {marks(']')}")
        bodies = [f"{marks(tool.name, ARGUMENTS)} {tool.arguments(grammar)}" for tool in tools]
        call = grammar.rule("call", " | ".join(bodies))
        return CallRule(OPEN, repeated(call, most, marks(OPEN)))


def _list(source: Source, opened: str) -> Parse[None]:
    """Objects up to the closing bracket; what comes instead of one is text."""
    while True:
        source.mark()
        yield from source.space()
        space = source.since_mark()
        if not (yield from read_object(source)):
            yield TextDelta(opened + space)
            return
        opened = ""
        source.mark()
        yield from source.space()
        mark = yield from source.accept_any(",", "]")
        if mark is None:
            yield TextDelta(source.since_mark())
        source.unmark()
        if mark != ",":
            return


def _named(source: Source) -> Parse[bool]:
    """`name[ARGS]{...}`, perhaps with an id; False, still marked, when it is none."""
    name = yield from source.word(lambda character: character not in '[{"\n')
    call_id = None
    if (yield from source.accept(CALL_ID)):
        call_id = (yield from source.word(str.isalnum)) or None
    if not name.strip() or not (yield from source.accept(ARGUMENTS)):
        return False
    yield from source.space()
    return (yield from json_call(source, name.strip(), call_id))
