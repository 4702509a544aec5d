"""MiniMax M2: invocations in a tag of its own.

<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Paris</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.text.tools.dialect import CallRule, Marks, Tool, known, repeated, section
from penstock.text.tools.tagged import Shape, TaggedForm, read_arguments, tagged_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.text.grammars.grammar import Grammar
    from penstock.text.parsing import Parse, Source

OPEN, CLOSE, INVOKE = "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="'
_SHAPE = Shape('<parameter name="', '">', "</parameter>", "</invoke>")
_FORM = TaggedForm('<parameter name="{}">', "</parameter>")


class MiniMax:
    """Invocations in a tag."""

    name = "minimax"
    visible = (OPEN, CLOSE)

    def taught_by(self, template: str) -> bool:
        """The tag has the family's name."""
        return "minimax:tool_call" in template

    def parse(self, source: Source, tools: Sequence[Tool]) -> Parse[None]:
        """Several invocations may stand in one tag."""

        def call(source: Source) -> Parse[bool]:
            name = yield from source.word(lambda character: character not in '"<>\n')
            if not name or not (yield from source.accept('">')):
                return False
            source.unmark()
            yield from read_arguments(source, _SHAPE, name, known(tools, name))
            return True

        yield from section(source, (OPEN, INVOKE, CLOSE), call)

    def calls(
        self, grammar: Grammar, tools: Sequence[Tool], most: int, marks: Marks, template: str
    ) -> CallRule:
        """As the template writes them."""
        bodies = [
            f"{marks(INVOKE + tool.name + chr(34) + '>' + chr(10))} "
            f"{tagged_call(grammar, tool, _FORM, f'p{number}')} {marks('</invoke>' + chr(10))}"
            for number, tool in enumerate(tools)
        ]
        call = grammar.rule("call", " | ".join(bodies))
        return CallRule(OPEN, f"{marks(chr(10))} {repeated(call, most)} {marks(CLOSE)}")
