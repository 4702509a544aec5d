"""Reading a request's body: how large, how fast, and compressed or not.

What a body takes in memory is booked as it comes, a little ahead of it: what a client only
announces would keep others from what it never uses. Knows HTTP's messages, not what a body means.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from penstock.errors import BadRequest, BodyTooLarge, BodyTooSlow, Overloaded, UnknownEncoding
from penstock.memory.clients.json_weight import BODY_FACTOR, JsonWeight
from penstock.server.http.threads import run_in_thread_if_large

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from penstock.memory.clients.requests import RequestMemory
    from penstock.memory.clients.waits import ClientWait
    from penstock.server.http.exchange import Receive

_SILENCE_S = 60.0  # in the middle of a body
_FIRST_BYTES = 16 << 10  # booked before anything has come
_PIECE_BYTES = 64 << 10  # of what is unpacked at once
_MAX_MEMBERS = 64  # compressed streams, one behind the other
BOM = b"\xef\xbb\xbf"


class ClientGone(Exception):  # noqa: N818 - not an error: the client may leave when it likes
    """The client has closed the connection; there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a body may be, and how long it may take to come."""

    max_bytes: int  # as it comes, and unpacked
    whole_s: float = 600.0
    rate: int = 16 << 10  # bytes a second, at least, once the grace is over
    grace_s: float = 10.0

    def left_s(self, waited_s: float, moved_bytes: int) -> float:
        """How much longer a client may be waited for that has sent so much in so long."""
        slow = self.grace_s + moved_bytes / max(self.rate, 1) - waited_s
        return min(slow, self.whole_s - waited_s, _SILENCE_S)

    def too_large(self, size: int | None = None) -> BodyTooLarge:
        """The refusal of a body that is."""
        known = f"has {size} bytes" if size is not None else "is longer than allowed"
        return BodyTooLarge(
            f"The request body {known}; the limit is {self.max_bytes} bytes (server.max_body)."
        )

    def too_slow(self, wait: ClientWait) -> BodyTooSlow | Overloaded:
        """The refusal of a body that is."""
        came = f"{wait.moved_bytes} bytes came in {wait.waited_s:.1f} seconds."
        if wait.ended:
            return Overloaded(
                f"The request body came too slowly while others waited for memory: {came} Send it "
                "faster, or try again shortly.",
                retry_after_s=5,
                numbers={"reason": "memory", "held_bytes": wait.memory.size},
            )
        return BodyTooSlow(
            f"The request body is too slow: {came} A body has "
            f"at most {self.whole_s:g} seconds (server.body_s), after the first "
            f"{self.grace_s:g} (server.body_grace_s) at least {self.rate} bytes a second must "
            f"have come (server.body_rate), and it may not stop for {_SILENCE_S:g}."
        )


async def read_body(
    receive: Receive, memory: RequestMemory, limits: BodyLimits, declared: int, encoding: str | None
) -> bytes:
    """The whole body, unpacked, with what it takes once decoded booked; when it is refused nothing
    of it is held any more."""
    pieces: list[bytes] = []
    try:
        async for piece in _pieces(receive, memory, limits, declared, encoding):
            pieces.append(piece)  # noqa: PERF401 - an error's traceback would hold a comprehension
    except BaseException:
        pieces.clear()
        raise
    if pieces:
        pieces[0] = pieces[0].removeprefix(BOM)
    return await run_in_thread_if_large(sum(map(len, pieces)), partial(b"".join, pieces))


async def _pieces(
    receive: Receive, memory: RequestMemory, limits: BodyLimits, declared: int, encoding: str | None
) -> AsyncIterator[bytes]:
    """Pieces of the body, each booked."""
    unpack, weight, wait = _unpacker(encoding), JsonWeight(), memory.waits(limits)
    held, more = 0, True
    booked = min(declared, _FIRST_BYTES)
    await memory.grow(booked * BODY_FACTOR)
    while more:
        try:
            async with wait.waiting():
                message = await receive()
        except TimeoutError:
            raise limits.too_slow(wait) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        wait.moved_bytes += len(chunk)
        if wait.moved_bytes > limits.max_bytes:
            raise limits.too_large()
        for piece in unpack.pieces(chunk, last=not more):
            held += len(piece)
            if held > limits.max_bytes:
                raise limits.too_large()
            weight.add(piece)
            if held > booked:
                ahead = max(held, min(2 * held, declared))
                await memory.grow((ahead - booked) * BODY_FACTOR)
                booked = ahead
            if (needed := weight.decoded_bytes - memory.size) > memory.room_bytes:
                await memory.grow(needed)  # which is refused: the rest need not come
            yield piece
            if len(piece) >= _PIECE_BYTES:
                await asyncio.sleep(0)
    await memory.grow(max(0, weight.decoded_bytes - memory.size))


class _Plain:
    """A body as it is."""

    def pieces(self, chunk: bytes, *, last: bool) -> Iterator[bytes]:
        if chunk:
            yield chunk


class _Deflated:
    """A body in zlib's or gzip's format, in pieces that are no larger than was asked for."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(zlib.MAX_WBITS | 32)
        self._begun = False
        self._members = 1

    def pieces(self, chunk: bytes, *, last: bool) -> Iterator[bytes]:
        try:
            piece = b""
            while chunk or len(piece) == _PIECE_BYTES:  # which it may have more of
                self._begun = True
                if piece := self._stream.decompress(chunk, _PIECE_BYTES):
                    yield piece
                chunk = self._stream.unconsumed_tail
                if self._stream.eof and (chunk := self._stream.unused_data):
                    self._next_member()
        except zlib.error as error:
            raise BadRequest(f"The request body cannot be unpacked: {error}.") from None
        if last and self._begun and not self._stream.eof:
            raise BadRequest("The request body ends before its compressed data does.")

    def _next_member(self) -> None:
        self._members += 1
        if self._members > _MAX_MEMBERS:
            raise BadRequest(
                f"The request body is packed in more than {_MAX_MEMBERS} parts; pack it as one."
            )
        self._stream = zlib.decompressobj(zlib.MAX_WBITS | 32)


def _unpacker(encoding: str | None) -> _Plain | _Deflated:
    match (encoding or "identity").strip().lower():
        case "identity":
            return _Plain()
        case "gzip" | "x-gzip" | "deflate":
            return _Deflated()
        case other:
            raise UnknownEncoding(
                f"The content-encoding {other[:100]!r} is not understood; send the body as it is, "
                "or with gzip or deflate."
            )
