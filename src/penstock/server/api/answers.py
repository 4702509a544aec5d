"""The two ways to answer: all at once, or as a stream of events.

It knows pieces and HTTP, not what an event says: that is the protocol's `Renderer`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from penstock.server.api.backlog import Backlog

if TYPE_CHECKING:
    from penstock.errors import PenstockError
    from penstock.server.api.exchange import Exchange
    from penstock.server.api.generation import Generation, Piece, Usage

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"


class Renderer(Protocol):
    """A protocol's way to say an answer as events."""

    media_type: str

    @property
    def keep_alive(self) -> bytes:
        """What says, while nothing else is to be said, that the answer will come."""

    def opening(self, usage: Usage) -> bytes:
        """What begins the stream."""

    def events(self, piece: Piece) -> bytes:
        """What the client is sent for this piece; may be empty."""

    async def closing(self, usage: Usage) -> bytes:
        """What ends the stream."""

    def failing(self, error: PenstockError) -> bytes:
        """What ends a stream that cannot go on."""


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

    So an error before that has a status of its own; later ones are said in the stream.
    """
    backlog = Backlog(exchange.share)
    exchange.failing = renderer.failing

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
            content = b""
            if ended and not pieces and exchange.status is None:
                await producer  # ended before the first piece: its error gets a status
            if exchange.status is None:
                await exchange.begin(200, _stream_headers(renderer))
                content = renderer.opening(generation.usage)
            content += b"".join(map(renderer.events, pieces))
            if content or not (pieces or ended):
                await exchange.write(content or renderer.keep_alive)
            backlog.sent()
        await producer
        await exchange.write(await renderer.closing(generation.usage), more=False)

    async def answer() -> None:
        producer = asyncio.ensure_future(produce())
        try:
            await relay(producer)
        finally:
            producer.cancel()
            await asyncio.gather(producer, return_exceptions=True)

    await exchange.while_connected(answer())


def _stream_headers(renderer: Renderer) -> dict[str, str]:
    return {
        "content-type": renderer.media_type,
        "cache-control": "no-cache",
        "x-accel-buffering": "no",  # a proxy in front must not hold tokens back
    }


async def collect(exchange: Exchange, generation: Generation, choices: int) -> list[list[Piece]]:
    """All pieces of all choices, once they are complete."""
    collected = Collected(choices)
    await exchange.while_connected(generation.run(collected))
    return collected.pieces
