"""Llama 3: the whole answer is a JSON object, often behind a token of its own.

    <|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}

Several are separated by semicolons. An object that names no tool is an answer like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.text.parts import TextDelta
from penstock.text.tools.dialect import CallRule, Marks, Tool, repeated
from penstock.text.tools.json_call import object_rule, read_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.text.grammars.grammar import Grammar
    from penstock.text.parsing import Parse, Source

TAG = "<|python_tag|>"


class LlamaJson:
    """Bare JSON."""

    name = "llama_json"
    visible = (TAG,)

    def taught_by(self, template: str) -> bool:
        """The token, or the role in which results are told."""
        return TAG in template or ("ipython" in template and '"parameters"' in template)

    def parse(self, source: Source, tools: Sequence[Tool]) -> Parse[None]:
        """Calls stand at the beginning, or behind the token."""
        source.mark()
        yield from source.space()
        if (yield from source.peek()) == "{":
            space = source.since_mark()
            yield from _calls(source, tools, space)
        else:
            source.rewind()
        while (yield from source.until(TextDelta, TAG)) is not None:
            source.mark()
            yield from source.space()
            yield from _calls(source, tools, TAG + source.since_mark())

    def calls(
        self, grammar: Grammar, tools: Sequence[Tool], most: int, marks: Marks, template: str
    ) -> CallRule:
        """Without the token, as the models write where they are given plain functions."""
        call = object_rule(grammar, tools, "parameters")
        return CallRule("", repeated(call, most, marks("; ")))


def _calls(source: Source, tools: Sequence[Tool], opened: str) -> Parse[None]:
    """Objects one after the other; what stood before the first is text if it is none."""
    names = [tool.name for tool in tools]
    while (yield from read_object(source, names)):
        opened = ""
        source.mark()
        yield from source.space()
        yield from source.accept(";")
        yield from source.space()
        if (yield from source.peek()) != "{":
            break
        opened = source.since_mark()
    else:
        yield TextDelta(opened)
        return
    yield TextDelta(source.since_mark().replace(";", "", 1).lstrip())
