"""The skeleton of every endpoint that generates: read, prepare, generate, send.

It knows pieces and HTTP, not what an event says: that is the protocol's `Answer`.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from penstock.memory.clients.requests import LOGPROB_BYTES
from penstock.server.http.exchange import decode_json
from penstock.server.http.threads import run_in_thread_if_large
from penstock.server.pipeline.generation import Generation

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from penstock.errors import PenstockError
    from penstock.server.http.exchange import Exchange
    from penstock.server.pipeline.backlog import Backlog
    from penstock.server.pipeline.generation import Job, Usage
    from penstock.server.pipeline.pieces import Piece
    from penstock.server.pipeline.services import PipelineServices

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"
Fields = TypeVar("Fields")
Result = TypeVar("Result")


class Answer:
    """A protocol's way to write an answer, whole or as events."""

    media_type = EVENT_STREAM

    @property
    def keep_alive(self) -> bytes:
        """What says, while nothing else is to be said, that the answer will come."""
        return KEEP_ALIVE

    def document(self, choices: list[list[Piece]], usage: Usage) -> object:
        """The whole answer as one JSON document."""
        raise NotImplementedError

    async def whole(self, choices: list[list[Piece]], usage: Usage, size: int) -> bytes:
        """The document encoded; about `size` bytes of it."""
        return await run_in_thread_if_large(
            size, lambda: msgspec.json.encode(self.document(choices, usage))
        )

    def opening(self, usage: Usage) -> bytes:
        """What begins the stream; nothing where the first piece does."""
        return b""

    def weight(self, pieces: list[Piece]) -> int:
        """About how many bytes it takes to render these."""
        size = 0
        for piece in pieces:  # most often one, without log-probabilities
            size += len(piece.text)
            if piece.logprobs:
                size += LOGPROB_BYTES * sum(1 + len(one.top) for one in piece.logprobs)
            if piece.prompt_logprobs:
                size += LOGPROB_BYTES * len(piece.prompt_logprobs)
        return size

    def events(self, piece: Piece) -> bytes:
        """What the client is sent for this piece; may be empty."""
        raise NotImplementedError

    async def closing(self, usage: Usage) -> bytes:
        """What ends the stream."""
        raise NotImplementedError

    def failing(self, error: PenstockError) -> bytes:
        """What ends a stream that cannot go on."""
        raise NotImplementedError


async def read_request(
    exchange: Exchange,
    decoder: msgspec.json.Decoder[Fields],
    prepare: Callable[[Fields], Coroutine[None, None, Result]],
) -> tuple[Fields, Result]:
    """The fields of a body, and what `prepare` makes of them while the client is there."""
    async with exchange.body() as body:
        fields = await decode_json(decoder, body)
        return fields, await exchange.while_connected(prepare(fields))


async def respond(
    exchange: Exchange,
    services: PipelineServices,
    job: Job,
    write: Callable[[Generation], Answer],
    *,
    stream: bool | None,
) -> None:
    """Generate what was prepared and send it as `write` has it."""
    generation = Generation(exchange, services, job)
    answer = write(generation)
    with generation.observed():
        if stream:
            keepalive_after_s = services.config.server.keepalive_after_s
            with services.backlogs.open(exchange.memory) as backlog:
                await send_stream(exchange, generation, answer, backlog, keepalive_after_s)
            return
        collected = Collected(len(job.prompts) * job.n)
        await exchange.while_connected(generation.run(collected))
        # An answer is booked at several times what is rendered of it.
        size = exchange.memory.size // 8
        whole = await answer.whole(collected.pieces, generation.usage, size)
        await exchange.send_bytes(whole, "application/json")


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
    exchange: Exchange,
    generation: Generation,
    answer: Answer,
    backlog: Backlog,
    keepalive_after_s: float,
) -> None:
    """Answer with events. The head waits for the first piece or `keepalive_after_s`.

    So an error before that has a status of its own; later ones are said in the stream.
    """
    exchange.failing = answer.failing

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
                await exchange.begin(200, _stream_headers(answer))
                opening = partial(answer.opening, generation.usage)
                content = await run_in_thread_if_large(exchange.memory.size, opening)
            content += await run_in_thread_if_large(
                answer.weight(pieces), partial(_rendered, answer, pieces)
            )
            if content or not (pieces or ended):
                await exchange.write(content or answer.keep_alive)
            backlog.sent()
        await producer
        await exchange.write(await answer.closing(generation.usage), more=False)

    async def send() -> None:
        producer = asyncio.ensure_future(produce())
        try:
            await relay(producer)
        finally:
            producer.cancel()
            await asyncio.gather(producer, return_exceptions=True)

    await exchange.while_connected(send())


def _rendered(answer: Answer, pieces: list[Piece]) -> bytes:
    return b"".join(map(answer.events, pieces))


def _stream_headers(answer: Answer) -> dict[str, str]:
    return {
        "content-type": answer.media_type,
        "cache-control": "no-cache",
        "x-accel-buffering": "no",  # a proxy in front must not hold tokens back
    }
