"""Llama 3.2 and 4: the answer is a Python list of calls.

    [weather(city="Paris", days=3), time(zone="CET")]

A call is read when its bracket closes: until then `city="…"` cannot be told from a longer word.
"""

from __future__ import annotations

import ast
import json
import re
from typing import TYPE_CHECKING, Any

from penstock.text.grammars.grammar import literal
from penstock.text.parsing import CutShort
from penstock.text.parts import CallArguments, CallBegin, CallEnd, TextDelta
from penstock.text.tools.dialect import CallRule, Marks, Tool, known, properties, repeated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.text.grammars.grammar import Grammar
    from penstock.text.parsing import Parse, Source

OPEN, CLOSE = "<|python_start|>", "<|python_end|>"
_LONGEST = 64 << 10
_DEEPEST = 32
_BEGUN = re.compile(rf"\s*(?:{re.escape(OPEN)})?[\s,\[]*([\w.-]*)(\(?)")


class Pythonic:
    """Calls as Python writes them."""

    name = "pythonic"
    visible = (OPEN, CLOSE)

    def taught_by(self, template: str) -> bool:
        """The token, or the example that these templates give."""
        return OPEN in template or "func_name1(params_name1=" in template

    def parse(self, source: Source, tools: Sequence[Tool]) -> Parse[None]:
        """A list at the beginning, or behind the token; it must call known tools."""
        source.mark()
        yield from source.space()
        yield from source.accept(OPEN)
        yield from source.space()
        yield from _list(source, tools)
        while (yield from source.until(TextDelta, OPEN, CLOSE)) is not None:
            source.mark()
            yield from source.space()
            yield from _list(source, tools)

    def calls(
        self, grammar: Grammar, tools: Sequence[Tool], most: int, marks: Marks, template: str
    ) -> CallRule:
        """Arguments by name, each a JSON value: what Python reads differently is read as JSON."""
        bodies = []
        for tool in tools:
            arguments = _arguments(grammar, tool)
            bodies.append(f"{literal(tool.name + '(')} {arguments} {literal(')')}")
        call = grammar.rule("call", " | ".join(bodies))
        return CallRule("", f"{marks('[')} {repeated(call, most, marks(', '))} {marks(']')}")


def _arguments(grammar: Grammar, tool: Tool) -> str:
    def body_of(name: str, wanted: Any) -> str:
        schema = wanted if isinstance(wanted, dict) else {}
        return f"{literal(name + '=')} {grammar.json(schema, lenient=not tool.strict)}"

    return properties(grammar, tool.parameters, body_of, literal(", "))


def _list(source: Source, tools: Sequence[Tool]) -> Parse[None]:
    """The list, if it is one; the source is marked, and what is no call is text."""
    try:
        yield from _calls(source, tools)
    except CutShort:
        if source.marked:
            yield from _cut_list(source.since_mark(), tools)
        raise


def _cut_list(written: str, tools: Sequence[Tool]) -> Parse[None]:
    """What was cut off: a call, as far as it got, or text."""
    begun = _BEGUN.match(written)
    assert begun is not None  # all of it is optional
    name, bracket = begun[1], begun[2]
    if bracket and known(tools, name) is not None:
        yield CallBegin(name)
    elif bracket or not any(tool.name.startswith(name) for tool in tools):
        yield TextDelta(written)


def _calls(source: Source, tools: Sequence[Tool]) -> Parse[None]:
    if not (yield from source.accept("[")):
        yield TextDelta(source.since_mark())
        return
    while True:
        yield from source.space()
        name = yield from source.word(lambda character: character.isalnum() or character in "_.-")
        if known(tools, name) is None or (yield from source.peek()) != "(":
            break
        written = yield from _brackets(source)
        arguments = _decoded(written)
        if arguments is None:
            break
        source.unmark()
        yield CallBegin(name)
        yield CallArguments(arguments)
        yield CallEnd()
        source.mark()
        yield from source.space()
        mark = yield from source.accept_any(",", "]")
        if mark != ",":
            if mark is None:
                yield TextDelta(source.since_mark())
            source.unmark()
            return
    yield TextDelta(source.since_mark())


def _brackets(source: Source) -> Parse[str]:
    """From an opening bracket to the one that closes it, strings aside."""
    written: list[str] = []
    depth, quote, escaped = 0, "", False
    while (character := (yield from source.peek())) and len(written) < _LONGEST:
        yield from source.accept(character)
        written.append(character)
        if quote:
            if not escaped and character == quote:
                quote = ""
            escaped = character == "\\" and not escaped
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
            if depth > _DEEPEST:
                break
        elif character in ")]}":
            depth -= 1
            if depth == 0:
                break
    return "".join(written)


_NAMES = {"true": True, "false": False, "null": None}


def _decoded(written: str) -> str | None:
    """Arguments by name as JSON; None when it is anything else."""
    try:
        call = ast.parse(f"f{written}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {str(each.arg): _literal(each.value) for each in call.keywords if each.arg}
        return json.dumps(arguments, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _literal(node: ast.expr) -> Any:
    """A literal of Python, or of JSON."""
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            str(ast.literal_eval(key)): _literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    return ast.literal_eval(node)
