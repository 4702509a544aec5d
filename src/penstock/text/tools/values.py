"""Arguments that a model writes as text between marks, turned into JSON as they come.

A text argument streams; any other is turned into JSON once it is whole, by its own form: what
reads as JSON is JSON, what does not is a text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from penstock.text.parts import CallArguments, CallBegin, CallEnd, TextDelta

if TYPE_CHECKING:
    from penstock.text.parsing import Parse, Source
    from penstock.text.tools.dialect import Tool

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
            yield from _value(source, shape, streams=kind == "string")
            continue
        yield CallArguments("}" if count else "{}")
        yield CallEnd()
        if mark is None:
            yield TextDelta(source.since_mark())
        source.unmark()
        return


def _value(source: Source, shape: Shape, *, streams: bool) -> Parse[None]:
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
