"""JSON that may be far longer than the request that asked for it: made in pieces, each booked.

A few letters of a body name a token of hundreds, and a prompt may be repeated in every answer.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from penstock.server.http.threads import run_in_thread_if_large

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.memory.clients.requests import RequestMemory
    from penstock.server.http.exchange import Exchange
    from penstock.text.tokenizer import Tokenizer
    from penstock.wire import TokenIds

_IDS_AT_ONCE = 1024  # a millisecond of work
_CHARACTERS_AT_ONCE = 64 << 10
Items = TypeVar("Items", str, "TokenIds")


@dataclass(frozen=True, slots=True)
class JsonText:
    """A text as JSON, without its quotes."""

    pieces: list[bytes]
    characters: int  # of the text itself

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(map(len, self.pieces))


async def json_list(
    memory: RequestMemory, ids: TokenIds, item: Callable[[int], object]
) -> list[bytes]:
    """A JSON list with something for each id."""
    pieces = await _in_pieces(
        memory, ids, lambda some: b"," + msgspec.json.encode(list(map(item, some)))[1:-1]
    )
    return [b"[", *[piece.removeprefix(b",") for piece in pieces[:1]], *pieces[1:], b"]"]


async def json_of_tokens(memory: RequestMemory, tokenizer: Tokenizer, ids: TokenIds) -> JsonText:
    """The text of token ids, exactly as when all are decoded at once."""
    decoding = tokenizer.decoder.start()
    characters = 0

    def decode(some: TokenIds) -> bytes:
        nonlocal characters
        tokens = [token for one in some if (token := tokenizer.token(one)) is not None]
        text = "".join(map(decoding.push, tokens))
        characters += len(text)
        return _inside(text)

    pieces = await _in_pieces(memory, ids, decode)
    rest = decoding.finish()
    return JsonText([*pieces, _inside(rest)], characters + len(rest))


async def json_of_text(memory: RequestMemory, text: str) -> JsonText:
    """A text."""
    return JsonText(await _in_pieces(memory, text, _inside), len(text))


async def send_json_pieces(exchange: Exchange, parts: list[bytes]) -> None:
    """Answer with the parts, one behind the other."""
    length = sum(map(len, parts))
    await exchange.begin(200, {"content-type": "application/json", "content-length": str(length)})
    for part in parts:
        await exchange.write(part)
    await exchange.write(b"", more=False)


async def _in_pieces(
    memory: RequestMemory, items: Items, render: Callable[[Items], bytes]
) -> list[bytes]:
    at_once = _CHARACTERS_AT_ONCE if isinstance(items, str) else _IDS_AT_ONCE
    work_bytes = len(items) * (_CHARACTERS_AT_ONCE // at_once)
    pieces: list[bytes] = []
    for start in range(0, len(items), at_once):
        some = items[start : start + at_once]
        piece = await run_in_thread_if_large(work_bytes, partial(render, some))
        await memory.grow(sys.getsizeof(piece))
        pieces.append(piece)
    return pieces


def _inside(text: str) -> bytes:
    return msgspec.json.encode(text)[1:-1]
