"""GLM 4.5 and later: keys and values in tags of their own.

<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.text.parts import TextDelta
from penstock.text.tools.dialect import CallRule, Marks, Tool, known, repeated
from penstock.text.tools.tagged import Shape, TaggedForm, read_arguments, tagged_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.text.grammars.grammar import Grammar
    from penstock.text.parsing import Parse, Source

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SHAPE = Shape("<arg_key>", "</arg_key>", "</arg_value>", CLOSE, value_open="<arg_value>")
_FORM = TaggedForm("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>")


class Glm:
    """Keys and values in tags."""

    name = "glm"
    visible = (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def taught_by(self, template: str) -> bool:
        """Only this family has these tags."""
        return "<arg_key>" in template

    def parse(self, source: Source, tools: Sequence[Tool]) -> Parse[None]:
        """A name that is no tool's makes it text."""
        while (yield from source.until(TextDelta, OPEN)) is not None:
            source.mark()
            yield from source.space()
            name = (yield from source.word(lambda character: character not in "<\n")).strip()
            tool = known(tools, name)
            if tool is None:
                yield TextDelta(OPEN + source.since_mark())
                continue
            source.unmark()
            yield from read_arguments(source, _SHAPE, name, tool)

    def calls(
        self, grammar: Grammar, tools: Sequence[Tool], most: int, marks: Marks, template: str
    ) -> CallRule:
        """As the template writes them."""
        bodies = [
            f"{marks(tool.name + chr(10))} {tagged_call(grammar, tool, _FORM, f'p{number}')}"
            for number, tool in enumerate(tools)
        ]
        call = grammar.rule("call", " | ".join(bodies))
        return CallRule(OPEN, f"{repeated(call, most, marks(CLOSE, chr(10), OPEN))} {marks(CLOSE)}")
