"""A call as one JSON object: `{"name": ..., "arguments": {...}}`, as several dialects have it.

Arguments stream as they come when the name stands before them, as it does in what models are
taught. Other orders are read once the object is whole. What is no call is given back as text.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.text.grammar import literal
from penstock.text.parts import CallArguments, CallBegin, CallEnd, TextDelta

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.text.grammar import Grammar
    from penstock.text.parsing import Parse, Source
    from penstock.text.tools.dialect import Tool

_KEYS = ('"arguments"', '"parameters"')


def read_object(source: Source, is_tool: Callable[[str], bool]) -> Parse[bool]:
    """One call; False, and nothing consumed, when what comes is none. No space before it."""
    if source.attempts == 0:
        return False
    source.mark()
    name = yield from _name_first(source)
    if name is not None and is_tool(name):
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
    if call is None or not is_tool(call[0]):
        source.rewind()
        source.attempts -= 1
        return False
    source.unmark()
    yield CallBegin(call[0])
    yield CallArguments(call[1])
    yield CallEnd()
    return True


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
