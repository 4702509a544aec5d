"""Kimi K2: marks that are tokens, an id made of name and number, then plain JSON.

<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0
<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.text.tools.dialect import CallRule, Marks, Tool, closing, json_call, repeated, section

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.text.grammars.grammar import Grammar
    from penstock.text.parsing import Parse, Source

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class Kimi:
    """Ids and plain JSON between tokens."""

    name = "kimi"
    visible = (OPEN, CLOSE, CALL, ARGUMENTS, END)

    def taught_by(self, template: str) -> bool:
        """Only this family has these tokens."""
        return CALL in template

    def parse(self, source: Source, tools: Sequence[Tool]) -> Parse[None]:
        """The model's own id is kept: it wants to see it again beside the result."""
        yield from section(source, (OPEN, CALL, CLOSE), _call)

    def calls(
        self, grammar: Grammar, tools: Sequence[Tool], most: int, marks: Marks, template: str
    ) -> CallRule:
        """Calls are numbered; any number will do."""
        number = grammar.rule("NUMBER", "/[0-9]{1,3}/")
        bodies = [
            f"{marks(CALL, f'functions.{tool.name}:')} {number} {marks(ARGUMENTS)} "
            f"{tool.arguments(grammar)} {marks(END)}"
            for tool in tools
        ]
        call = grammar.rule("call", " | ".join(bodies))
        return CallRule(OPEN, f"{repeated(call, most)} {marks(CLOSE)}")


def _call(source: Source) -> Parse[bool]:
    """One call behind its first mark; False, still marked, when it is none."""
    yield from source.space()
    call_id = (yield from source.word(lambda character: character not in "<{")).strip()
    name = call_id.removeprefix("functions.").partition(":")[0]
    if not name or not (yield from source.accept(ARGUMENTS)):
        return False
    yield from source.space()
    if not (yield from json_call(source, name, call_id)):
        return False
    yield from closing(source, END)
    return True
