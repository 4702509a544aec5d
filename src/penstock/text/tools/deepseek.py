"""DeepSeek V3, R1 and V3.1: marks that are tokens, then a name, then plain JSON.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

The older ones write `function<｜tool▁sep｜>weather` and put the JSON into a fenced block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.text.tools.dialect import CallRule, Marks, Tool, closing, json_call, repeated, section

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.text.grammars.grammar import Grammar
    from penstock.text.parsing import Parse, Source

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE, _FENCED = "\n```json\n", "\n```"


class DeepSeek:
    """Names and plain JSON between tokens."""

    name = "deepseek"
    visible = (OPEN, CLOSE, CALL, SEPARATOR, END)

    def taught_by(self, template: str) -> bool:
        """Only this family has these tokens."""
        return CALL in template

    def parse(self, source: Source, tools: Sequence[Tool]) -> Parse[None]:
        """Both forms; what stands between calls is white space."""
        yield from section(source, (OPEN, CALL, CLOSE), _call)

    def calls(
        self, grammar: Grammar, tools: Sequence[Tool], most: int, marks: Marks, template: str
    ) -> CallRule:
        """The form that the template has."""
        fenced = "```json" in template
        bodies = []
        for tool in tools:
            arguments = tool.arguments(grammar)
            if fenced:
                head = marks("function", SEPARATOR, tool.name + _FENCE)
                bodies.append(f"{marks(CALL)} {head} {arguments} {marks(_FENCED, END)}")
            else:
                head = marks(CALL, tool.name, SEPARATOR)
                bodies.append(f"{head} {arguments} {marks(END)}")
        call = grammar.rule("call", " | ".join(bodies))
        between = marks("\n") if fenced else ""
        return CallRule(OPEN, f"{repeated(call, most, between)} {marks(CLOSE)}")


def _call(source: Source) -> Parse[bool]:
    """One call behind its first mark; False, still marked, when it is none."""
    name = yield from source.word(lambda character: character not in "<\n")
    if not name or not (yield from source.accept(SEPARATOR)):
        return False
    if name == "function":
        name = yield from source.word(lambda character: character not in "<\n")
        if not name or not (yield from source.accept(_FENCE)):
            return False
    if not (yield from json_call(source, name)):
        return False
    yield from closing(source, END, before="```")
    return True
