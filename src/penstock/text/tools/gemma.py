"""Gemma: names without quotes, texts between tokens of their own.

<start_function_call>call:weather{city:<escape>Paris<escape>,days:3}<end_function_call>
<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>          Gemma 4
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.text.grammars.grammar import literal
from penstock.text.parsing import CutShort
from penstock.text.parts import CallArguments, CallBegin, CallEnd, TextDelta
from penstock.text.tools.dialect import CallRule, Marks, Tool, properties, repeated, text_rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.text.grammars.grammar import Grammar
    from penstock.text.parsing import Parse, Source

_DEEPEST = 32
_BEGUN = re.compile(r"\s*call:\s*([^\s{]+)\s*\{")


@dataclass(frozen=True, slots=True)
class _Tokens:
    open: str
    close: str
    quote: str


_FORMS = (
    _Tokens("<start_function_call>", "<end_function_call>", "<escape>"),
    _Tokens("<|tool_call>", "<tool_call|>", '<|"|>'),
)


class Gemma:
    """Calls between tokens, with texts between others."""

    name = "gemma"
    visible = tuple(token for form in _FORMS for token in (form.open, form.close, form.quote))

    def taught_by(self, template: str) -> bool:
        """Only this family has these tokens."""
        return any(form.open in template for form in _FORMS)

    def parse(self, source: Source, tools: Sequence[Tool]) -> Parse[None]:
        """A call is read when it is whole; what cannot be read is text."""
        by_open = {form.open: form for form in _FORMS}
        while (mark := (yield from source.until(TextDelta, *by_open))) is not None:
            form = by_open[mark]
            try:
                written, closed = yield from source.taken_until(form.close)
            except CutShort as short:
                if begun := _BEGUN.match(short.taken):
                    yield CallBegin(begun[1])
                raise
            call = _decoded(written, form.quote)
            if call is None:
                yield TextDelta(form.open + written + (closed or ""))
                continue
            yield CallBegin(call[0])
            yield CallArguments(call[1])
            yield CallEnd()

    def calls(
        self, grammar: Grammar, tools: Sequence[Tool], most: int, marks: Marks, template: str
    ) -> CallRule:
        """Text and numbers by their type, anything else as the JSON it stands for."""
        form = next((form for form in _FORMS if form.open in template), _FORMS[0])
        writer = _Writer(grammar, marks, form)
        bodies = [
            f"{literal(f'call:{tool.name}')} {writer.object(tool.schema, tool)}" for tool in tools
        ]
        call = grammar.rule("call", " | ".join(bodies))
        return CallRule(
            form.open,
            f"{repeated(call, most, marks(form.close, form.open))} {marks(form.close)}",
        )


@dataclass(slots=True)
class _Writer:
    """Schemas as rules of this dialect."""

    grammar: Grammar
    marks: Marks
    form: _Tokens
    _rules: int = 0

    def object(self, schema: dict[str, Any], tool: Tool, depth: int = _DEEPEST) -> str:
        """`{name:value,…}`."""

        def body_of(name: str, wanted: Any) -> str:
            return f"{literal(name + ':')} {self._value(wanted, tool, depth - 1)}"

        body = properties(self.grammar, schema, body_of, literal(","))
        return f"{literal('{')} {body} {literal('}')}"

    def _value(self, wanted: Any, tool: Tool, depth: int) -> str:
        wanted = wanted if isinstance(wanted, dict) else {}
        quote = self.marks(self.form.quote)
        match wanted.get("type"):
            case "string" if isinstance(choices := wanted.get("enum"), list):
                texts = " | ".join(literal(str(choice)) for choice in choices)
                return f"({quote} ({texts}) {quote})"
            case "string":
                self._rules += 1
                name = f"text{self._rules}"
                if self.marks.is_special(self.form.quote):
                    return f"({quote} {self.grammar.rule(name, text_rule(wanted))} {quote})"
                body = f"{text_rule(wanted)} {literal(self.form.quote)}"
                return f"({quote} {self.grammar.rule(f'{name}[lazy]', body)})"
            case "object" if depth > 0:
                return self.object(wanted, tool, depth)
            case "array" if depth > 0:
                # A rule, since it stands there twice: nested lists would double with each level.
                item = self.grammar.part(self._value(wanted.get("items"), tool, depth - 1))
                return f"({literal('[')} ({item} ({literal(',')} {item})*)? {literal(']')})"
        return self.grammar.json(wanted, lenient=not tool.strict)


def _decoded(written: str, quote: str) -> tuple[str, str] | None:
    """Name and arguments of a call."""
    head, brace, rest = written.strip().partition("{")
    name = head.strip().removeprefix("call:").strip()
    if not name or not brace or not head.strip().startswith("call:"):
        return None
    reader = _Reader("{" + rest, quote)
    try:
        value = reader.value(_DEEPEST)
    except (ValueError, IndexError):
        return None
    return (name, json.dumps(value, ensure_ascii=False)) if reader.at_end() else None


class _Reader:
    """Values of this dialect, read from a text that is whole."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self._at = 0

    def at_end(self) -> bool:
        return not self._text[self._at :].strip()

    def value(self, depth: int) -> Any:
        if depth == 0:
            raise ValueError("nested too deeply")
        self._space()
        if self._accept(self._quote):
            end = self._text.index(self._quote, self._at)
            text, self._at = self._text[self._at : end], end + len(self._quote)
            return text
        if self._accept("{"):
            return self._members(depth)
        if self._accept("["):
            return self._items(depth)
        return self._scalar()

    def _members(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        self._space()
        while not self._accept("}"):
            end = self._text.index(":", self._at)
            key, self._at = self._text[self._at : end], end + 1
            members[key.replace(self._quote, "").strip().strip('"')] = self.value(depth - 1)
            self._next("}")
        return members

    def _items(self, depth: int) -> list[Any]:
        items = []
        self._space()
        while not self._accept("]"):
            items.append(self.value(depth - 1))
            self._next("]")
        return items

    def _next(self, close: str) -> None:
        self._space()
        if self._text[self._at] != close and not self._accept(","):
            raise ValueError("neither a comma nor the end")
        self._space()

    def _scalar(self) -> Any:
        end = self._at
        while self._text[end] not in ",]}":
            end += 1
        written, self._at = self._text[self._at : end].strip(), end
        try:
            return msgspec.json.decode(written)
        except msgspec.DecodeError:
            return written

    def _accept(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _space(self) -> None:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
