"""The two ways to answer: all at once, or as a stream of events.

It knows pieces and HTTP, not what an event says: that is the protocol's `Renderer`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

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
    keep_alive: bytes  # what says, while nothing else is to be said, that the answer will come

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


class _Stream:
    """A sink that hands pieces on as they come; None is the end."""

    keeps = False

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._used = False

    def put(self, piece: Piece) -> None:
        self._used = True
        self.queue.put_nowait(piece)

    def restart(self) -> bool:
        return not self._used

    async def next(self, patience_s: float) -> list[Piece | None]:
        """What is there, or after that long nothing."""
        try:
            async with asyncio.timeout(patience_s):
                pieces = [await self.queue.get()]
        except TimeoutError:
            return []
        while not self.queue.empty():
            pieces.append(self.queue.get_nowait())
        return pieces


async def send_stream(
    exchange: Exchange, generation: Generation, renderer: Renderer, keepalive_after_s: float
) -> None:
    """Answer with events. The head waits for the first piece or `keepalive_after_s`.

    So an error before that has a status of its own; later ones are said in the stream.
    """
    stream = _Stream()
    exchange.failing = renderer.failing

    async def produce() -> None:
        try:
            await generation.run(stream)
        finally:
            stream.queue.put_nowait(None)

    async def relay(producer: asyncio.Future[None]) -> None:
        ended = False
        while not ended:
            pieces = await stream.next(keepalive_after_s)
            ended = None in pieces
            content = b""
            if ended and len(pieces) == 1 and exchange.status is None:
                await producer  # ended before the first piece: its error gets a status
            if exchange.status is None:
                await exchange.begin(200, _stream_headers(renderer))
                content = renderer.opening(generation.usage)
            content += b"".join(renderer.events(piece) for piece in pieces if piece is not None)
            if content or not pieces:
                await exchange.write(content or renderer.keep_alive)
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
