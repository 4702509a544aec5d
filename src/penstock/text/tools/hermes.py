"""Hermes, Qwen and many others: JSON in tags.

<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.text.parts import TextDelta
from penstock.text.tools.dialect import CallRule, Marks, Tool, closing, repeated
from penstock.text.tools.json_call import object_rule, read_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.text.grammars.grammar import Grammar
    from penstock.text.parsing import Parse, Source

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    """JSON in tags."""

    name = "hermes"
    visible = (OPEN, CLOSE)

    def taught_by(self, template: str) -> bool:
        """The tag is its mark; others that use it are asked first."""
        return OPEN in template

    def parse(self, source: Source, tools: Sequence[Tool]) -> Parse[None]:
        """Any number of calls, text before, between and behind them."""
        while (yield from source.until(TextDelta, OPEN)) is not None:
            source.mark()
            yield from source.space()
            space = source.since_mark()
            if not (yield from read_object(source)):
                yield TextDelta(OPEN + space)
                continue
            yield from closing(source, CLOSE)

    def calls(
        self, grammar: Grammar, tools: Sequence[Tool], most: int, marks: Marks, template: str
    ) -> CallRule:
        """As the templates write them."""
        call = object_rule(grammar, tools, "arguments")
        between = marks("\n", CLOSE, "\n", OPEN, "\n")
        after = f"{marks(chr(10))} {repeated(call, most, between)} {marks(chr(10), CLOSE)}"
        return CallRule(OPEN, after)
