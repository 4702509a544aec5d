"""A call as one JSON object: `{"name": ..., "arguments": {...}}`, as several dialects have it.

Arguments stream as they come when the name stands before them, as it does in what models are
taught. Other orders are read once the object is whole. What is no call is given back as text.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.text.grammars.grammar import literal
from penstock.text.parsing import CutShort
from penstock.text.parts import CallArguments, CallBegin, CallEnd, TextDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.text.grammars.grammar import Grammar
    from penstock.text.parsing import Parse, Source
    from penstock.text.tools.dialect import Tool

_KEYS = ('"arguments"', '"parameters"')
_NAMED = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")')


def read_object(source: Source, names: Sequence[str] | None = None) -> Parse[bool]:
    """One call; False, and nothing consumed, when what comes is none. No space before it.

    `names` are those of the tools, where only they tell a call from text; None: marks do.
    """
    if source.attempts == 0:
        return False
    source.mark()
    try:
        return (yield from _object(source, names))
    except CutShort:
        if source.marked:
            yield from _cut_object(source.since_mark(), names)
        raise


def _object(source: Source, names: Sequence[str] | None) -> Parse[bool]:
    name = yield from _name_first(source)
    if name is not None and (names is None or name in names):
        source.unmark()
        yield CallBegin(name)
        yield from source.json_value(CallArguments)
        yield CallEnd()
        yield from source.space()
        yield from source.accept("}")
        return True
    source.rewind()
    source.mark()
    written: list[str] = []
    complete = yield from _held_value(source, written)
    call = decoded_call("".join(written)) if complete else None
    if call is None or not (names is None or call[0] in names):
        source.rewind()
        source.attempts -= 1
        return False
    source.unmark()
    yield CallBegin(call[0])
    yield CallArguments(call[1])
    yield CallEnd()
    return True


def _cut_object(written: str, names: Sequence[str] | None) -> Parse[None]:
    """What was cut off inside an object: a call, as far as it got, or text."""
    if named := _NAMED.match(written):
        name = _string(named[1])
        if name is not None and (names is None or name in names):
            yield CallBegin(name)
            return
    if names is not None and not _may_become_call("".join(written.split()), names):
        yield TextDelta(written)


def _may_become_call(written: str, names: Sequence[str]) -> bool:
    """Whether the beginning of an object, without its spaces, may be that of a call."""
    begun = '{"name":"'
    if len(written) > len(begun):
        rest = written.removeprefix(begun)
        called = rest != written and any(name.startswith(rest) for name in names)
    else:
        called = begun.startswith(written)
    keys = ("{" + key for key in _KEYS)
    return called or any(key.startswith(written) or written.startswith(key) for key in keys)


def _name_first(source: Source) -> Parse[str | None]:
    """The name, if the object begins with it and goes on with an object of arguments."""
    for mark in ("{", '"name"', ":"):
        if not (yield from source.accept(mark)):
            return None
        yield from source.space()
    name = yield from source.json_string()
    yield from source.space()
    if name is None or not (yield from source.accept(",")):
        return None
    yield from source.space()
    if (yield from source.accept_any(*_KEYS)) is None:
        return None
    yield from source.space()
    if not (yield from source.accept(":")):
        return None
    yield from source.space()
    if (yield from source.peek()) != "{":
        return None
    return _string(name)


def _held_value(source: Source, written: list[str]) -> Parse[bool]:
    """One JSON value, kept instead of sent on."""
    if (yield from source.peek()) not in ("{", "["):
        return False
    reading = source.json_value(TextDelta)
    while True:
        try:
            item = next(reading)
        except StopIteration as stop:
            return bool(stop.value)
        if isinstance(item, TextDelta):
            written.append(item.text)
        else:
            yield item


def decoded_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call that is whole."""
    content = _decode(text)
    if not isinstance(content, dict):
        return None
    name = content.get("name")
    if not isinstance(name, str) or not name:
        return None
    arguments = content.get("arguments", content.get("parameters", {}))
    if isinstance(arguments, str) and isinstance(_decode(arguments), dict):
        return name, arguments  # some models write the object into a string
    return name, json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _decode(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None


def _string(written: str) -> str | None:
    value = _decode(written)
    return value if isinstance(value, str) and value else None


def object_rule(grammar: Grammar, tools: Sequence[Tool], key: str, index: str = "") -> str:
    """The rule of one such object, with the spaces that models are taught."""
    bodies = []
    for number, tool in enumerate(tools):
        head = literal('{"name": ' + json.dumps(tool.name) + f', "{key}": ')
        body = f"{head} {tool.arguments(grammar)} {literal('}')}"
        bodies.append(grammar.rule(f"call{index}_{number}", body))
    return grammar.rule(f"call{index}", " | ".join(bodies))
