"""Arguments that a model writes as text between tags: the grammar of them, and their reading.

As a grammar: each required one in its order, the others if wanted.

A text value is anything of its length up to its closing tag; any other is JSON by its own schema.
What a schema says of several arguments together cannot be said here, so it is refused where it must
be kept. Read, a text argument streams; any other is turned into JSON once it is whole: what reads
as JSON is JSON, what does not is a text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import BadRequest, shortened
from penstock.text.grammars.grammar import literal, one_of
from penstock.text.parts import CallArguments, CallBegin, CallEnd, TextDelta
from penstock.text.tools.dialect import text_lengths, text_rule

if TYPE_CHECKING:
    from penstock.text.grammars.grammar import Grammar
    from penstock.text.parsing import Parse, Source
    from penstock.text.tools.dialect import Tool

_PLAIN = frozenset(
    {"type", "properties", "required", "additionalProperties", "description", "title", "$schema"}
)
_ANNOTATIONS = frozenset({"type", "description", "title", "default", "examples"})


@dataclass(frozen=True, slots=True)
class TaggedForm:
    """What stands before (with the argument's name) and behind a value."""

    before: str
    close: str  # the first of these ends a text
    lead: str = ""  # stands before the closing tag, where a model is taught so

    @property
    def behind(self) -> str:
        """All that follows a value which says itself where it ends."""
        return f"{self.lead}{self.close}\n"


def tagged_call(grammar: Grammar, tool: Tool, form: TaggedForm, prefix: str) -> str:
    """The arguments of one tool, in the order of its schema."""
    schema = tool.parameters
    if tool.strict and (odd := sorted(schema.keys() - _PLAIN)):
        raise BadRequest(
            f"`tools`: the model writes the arguments of {tool.name!r} one by one, so the keyword "
            f"{shortened(odd[0])!r} beside its properties cannot be enforced; drop it or `strict`.",
            param="tools",
        )
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        properties = {}
    required = schema.get("required")
    bodies = []
    for number, (name, wanted) in enumerate(properties.items()):
        value = _value(grammar, tool, wanted, form, f"{prefix}_{number}")
        body = f"{literal(form.before.format(name))} {value}"
        is_required = isinstance(required, list) and name in required
        bodies.append(f"({body})" if is_required else f"({body})?")
    return " ".join(bodies)


def _value(grammar: Grammar, tool: Tool, wanted: Any, form: TaggedForm, name: str) -> str:
    """A value and what stands behind it."""
    wanted = wanted if isinstance(wanted, dict) else {}
    behind = literal(form.behind)
    if wanted.get("type") != "string":
        return f"{grammar.json(wanted, lenient=not tool.strict)} {behind}"
    lengths = text_lengths(wanted)
    odd = sorted(wanted.keys() - _ANNOTATIONS - lengths.keys())
    if odd == ["enum"] and isinstance(wanted["enum"], list):
        return f"{one_of(literal(str(choice)) for choice in wanted['enum'])} {behind}"
    if odd and tool.strict:
        raise BadRequest(
            f"`tools`: the model writes text arguments of {tool.name!r} as they are, so the "
            f"keyword {shortened(odd[0])!r} of one of them cannot be enforced; drop it "
            "or `strict`.",
            param="tools",
        )
    # What stands before the closing tag is no part of a text that must not be too long.
    close = form.lead + form.close if lengths else form.close
    text = grammar.rule(f"{name}[lazy]", f"{text_rule(wanted)} {literal(close)}")
    return f"{text} {literal(chr(10))}"


# --- reading -------------------------------------------------------------------------------------

_PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Shape:
    """The marks around the arguments of one call: `<parameter=city>Paris</parameter>`."""

    key_open: str
    key_close: str
    value_close: str
    call_close: str
    value_open: str = ""
    newlines: bool = False  # one before and one behind a value are no part of it


def read_arguments(source: Source, shape: Shape, name: str, tool: Tool | None) -> Parse[None]:
    """The arguments and the end of a call that has begun; what does not belong ends it too."""
    yield CallBegin(name)
    count = 0
    while True:
        source.mark()
        yield from source.space()
        mark = yield from source.accept_any(shape.key_open, shape.call_close)
        if mark == shape.key_open:
            key, found = yield from source.taken_until(shape.key_close)
            if found is not None and shape.value_open:
                yield from source.space()
                yield from source.accept(shape.value_open)
            source.unmark()
            yield CallArguments(("{" if count == 0 else ", ") + _text(key.strip()) + ": ")
            count += 1
            kind = None if tool is None else tool.property_type(key.strip())
            yield from _read_value(source, shape, streams=kind == "string")
            continue
        yield CallArguments("}" if count else "{}")
        yield CallEnd()
        if mark is None:
            yield TextDelta(source.since_mark())
        source.unmark()
        return


def _read_value(source: Source, shape: Shape, *, streams: bool) -> Parse[None]:
    if shape.newlines:
        yield from source.accept("\n")
    if not streams:
        value, _ = yield from source.taken_until(shape.value_close)
        yield CallArguments(_json(value.removesuffix("\n") if shape.newlines else value))
        return
    held = ""  # a newline that may be the last
    yield CallArguments('"')
    reading = source.until(TextDelta, shape.value_close)
    while True:
        try:
            item = next(reading)
        except StopIteration:
            break
        if not isinstance(item, TextDelta):
            yield item
            continue
        text = held + item.text
        held = "\n" if shape.newlines and text.endswith("\n") else ""
        yield CallArguments(_text(text.removesuffix("\n") if held else text)[1:-1])
    yield CallArguments('"')


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _json(value: str) -> str:
    """A value as JSON, if it can be read as such; else as a text."""
    written = value.strip()
    written = _PYTHON.get(written, written)
    try:
        msgspec.json.decode(written)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return _text(value)
    return written
