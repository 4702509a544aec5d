"""Qwen3-Coder: parameters as tags with the name in them.

<tool_call>
<function=weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.text.parts import TextDelta
from penstock.text.tools.dialect import CallRule, Marks, Tool, closing, known, repeated
from penstock.text.tools.tagged import Shape, TaggedForm, read_arguments, tagged_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.text.grammars.grammar import Grammar
    from penstock.text.parsing import Parse, Source

OPEN, CLOSE, FUNCTION = "<tool_call>", "</tool_call>", "<function="
_SHAPE = Shape("<parameter=", ">", "</parameter>", "</function>", newlines=True)
_FORM = TaggedForm("<parameter={}>\n", "</parameter>", lead="\n")


class QwenCoder:
    """Functions and parameters in tags."""

    name = "qwen_coder"
    visible = (OPEN, CLOSE)

    def taught_by(self, template: str) -> bool:
        """Only this family writes the function's name so."""
        return FUNCTION in template and "<parameter=" in template

    def parse(self, source: Source, tools: Sequence[Tool]) -> Parse[None]:
        """Models of this family often leave the outer tag out."""
        while (mark := (yield from source.until(TextDelta, OPEN, FUNCTION))) is not None:
            space = ""
            if mark == OPEN:
                source.mark()
                yield from source.space()
                space = source.since_mark()
                if not (yield from source.accept(FUNCTION)):
                    yield TextDelta(OPEN + space)
                    continue
            source.mark()
            name = yield from source.word(lambda character: character not in "<>\n")
            if not name or not (yield from source.accept(">")):
                opened = OPEN + space + FUNCTION if mark == OPEN else FUNCTION
                yield TextDelta(opened + source.since_mark())
                continue
            source.unmark()
            yield from read_arguments(source, _SHAPE, name, known(tools, name))
            yield from closing(source, CLOSE)

    def calls(
        self, grammar: Grammar, tools: Sequence[Tool], most: int, marks: Marks, template: str
    ) -> CallRule:
        """As the template writes them."""
        bodies = [
            f"{marks(FUNCTION + tool.name + '>' + chr(10))} "
            f"{tagged_call(grammar, tool, _FORM, f'p{number}')} {marks('</function>')}"
            for number, tool in enumerate(tools)
        ]
        call = grammar.rule("call", " | ".join(bodies))
        between = marks("\n", CLOSE, "\n", OPEN, "\n")
        after = f"{marks(chr(10))} {repeated(call, most, between)} {marks(chr(10), CLOSE)}"
        return CallRule(OPEN, after)
