"""Grammars are written in a thread, and what that takes is booked for the request first.

Schemas, notations and tools are bounded where they are read; what becomes of them is several times
as large while it is written, and the text itself stays as long as its request.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec

from penstock.server.http.threads import build_grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.memory.clients.requests import RequestMemory
    from penstock.text.grammars.grammar import Format, GrammarSource
    from penstock.text.tools.dialect import Tool

# Bytes per byte of what the client wrote: 72 were measured for GBNF, whose every letter may be a
# node of a tree, 20 for schemas and 19 for tools (`testing/hostile_grammars.py`).
_GRAMMAR_FACTOR, _OTHER_FACTOR = 80, 24
_LEAST_BYTES = 8 << 10


def writing_bytes(wanted: Format | None, tools: Iterable[Tool] = ()) -> int:
    """What writing a grammar of this form and these tools takes; blocking, 1 ms for each MB."""
    size = 0 if wanted is None else _LEAST_BYTES
    for tool in tools:
        size += _LEAST_BYTES + _OTHER_FACTOR * len(msgspec.json.encode(tool.definition))
    if wanted is not None:
        size += wanted.size * (_GRAMMAR_FACTOR if wanted.kind == "grammar" else _OTHER_FACTOR)
    return size


async def written(
    memory: RequestMemory, wanted: Format, write: Callable[[], GrammarSource]
) -> GrammarSource:
    """The grammar that `write` makes of a form."""
    async with memory.holding(writing_bytes(wanted)):
        source = await build_grammar(write)
        keep(memory, source)
    return source


def keep(memory: RequestMemory, source: GrammarSource) -> None:
    """Book the text for as long as its request."""
    memory.grow_now(sys.getsizeof(source.text))
