"""The two ways to answer: all at once, or as a stream of server-sent events.

It knows pieces and HTTP, not what an event says: that is the protocol's `Renderer`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.server.api.backlog import Backlog

if TYPE_CHECKING:
    from penstock.server.api.exchange import Exchange
    from penstock.server.api.generation import Generation, Piece

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy in front must not hold tokens back
}


class Renderer(Protocol):
    """A protocol's way to say pieces as events."""

    def events(self, piece: Piece) -> bytes:
        """What the client is sent for this piece; may be empty."""

    def closing(self, usage: dict[str, object]) -> bytes:
        """What ends the stream."""


def event(content: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


class Collected:
    """A sink that keeps every piece until the end, by choice."""

    keeps = True

    def __init__(self, choices: int) -> None:
        self.pieces: list[list[Piece]] = [[] for _ in range(choices)]

    def put(self, piece: Piece) -> None:
        """Keep the piece."""
        self.pieces[piece.choice].append(piece)

    def restart(self) -> bool:
        """Nothing has left yet, so all can be forgotten."""
        self.pieces = [[] for _ in self.pieces]
        return True


async def send_stream(
    exchange: Exchange, generation: Generation, renderer: Renderer, keepalive_after_s: float
) -> None:
    """Answer with events. The head waits for the first piece or `keepalive_after_s`.

    So an error before that has a status of its own; the caller renders later ones in-band.
    """
    backlog = Backlog(exchange.share)

    async def produce() -> None:
        try:
            await generation.run(backlog)
        finally:
            backlog.end()

    async def relay(producer: asyncio.Future[None]) -> None:
        ended = False
        while not ended:
            pieces = await backlog.take(keepalive_after_s)
            ended = backlog.ended
            content = b"".join(map(renderer.events, pieces))
            if ended and not pieces and exchange.status is None:
                await producer  # ended before the first piece: its error gets a status
            if exchange.status is None:
                await exchange.begin(200, _STREAM_HEADERS)
            if content or not (pieces or ended):
                await exchange.write(content or KEEP_ALIVE)
            backlog.sent()
        await producer
        await exchange.write(renderer.closing(generation.usage.as_dict()), more=False)

    async def answer() -> None:
        producer = asyncio.ensure_future(produce())
        try:
            await relay(producer)
        finally:
            producer.cancel()
            await asyncio.gather(producer, return_exceptions=True)

    await exchange.while_connected(answer())


async def collect(exchange: Exchange, generation: Generation, choices: int) -> list[list[Piece]]:
    """All pieces of all choices, once they are complete."""
    collected = Collected(choices)
    await exchange.while_connected(generation.run(collected))
    return collected.pieces
