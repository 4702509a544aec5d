"""Vectors as JSON: made in pieces, so that none holds up the event loop for long."""

from __future__ import annotations

import base64
import sys
from array import array
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from penstock.server.http.threads import run_in_thread_if_large

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Of a number: four bytes as it comes, 22 letters at most as JSON; of a vector beside them.
_NUMBER_BYTES, _BASE64_BYTES, _VECTOR_BYTES = 4 + 22, 4 + 6, 400
_NUMBERS_AT_ONCE = 8192  # a millisecond of work


def vector_bytes(dimensions: int, *, as_base64: bool = False) -> int:
    """What one vector takes until it is sent."""
    return _VECTOR_BYTES + dimensions * (_BASE64_BYTES if as_base64 else _NUMBER_BYTES)


def numbers_of(vector: bytes) -> list[float]:
    """The numbers of a vector as it came: float32, little endian."""
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def json_numbers(vector: bytes) -> bytes:
    """A vector as a list."""
    return msgspec.json.encode(numbers_of(vector))


def json_base64(vector: bytes) -> bytes:
    """A vector as OpenAI's own client asks for it."""
    return b'"' + base64.b64encode(vector) + b'"'


async def json_vectors(
    vectors: Sequence[bytes], item: Callable[[int, bytes], bytes]
) -> list[bytes]:
    """What `item` makes of each vector and its number, with commas between."""
    pieces: list[bytes] = []
    each = max(1, len(vectors[0]) // 4) if vectors else 1
    at_once = max(1, _NUMBERS_AT_ONCE // each)
    size = sum(map(len, vectors))
    for start in range(0, len(vectors), at_once):
        some = partial(_items, vectors[start : start + at_once], start, item)
        pieces.append(await run_in_thread_if_large(size, some))
    return pieces


def _items(vectors: Sequence[bytes], first: int, item: Callable[[int, bytes], bytes]) -> bytes:
    made = b",".join(item(number, vector) for number, vector in enumerate(vectors, first))
    return b"," + made if first else made
