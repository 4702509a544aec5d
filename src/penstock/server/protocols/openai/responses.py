"""OpenAI's `/v1/responses`: answers as items, stored, continued by their id, in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import (
    BadRequest,
    ContextTooLong,
    InternalError,
    Overloaded,
    PenstockError,
    StoreUnavailable,
)
from penstock.memory.admission import RequestNeed
from penstock.server.http.threads import run_in_thread_if_large
from penstock.server.pipeline.answers import Collected, read_request, respond
from penstock.server.pipeline.conversation import prepare
from penstock.server.pipeline.front_door import FrontDoor
from penstock.server.pipeline.generation import Generation, Job
from penstock.server.protocols.openai.response_store import StoredResponse
from penstock.server.protocols.openai.responses_answer import ResponseAnswer
from penstock.server.protocols.openai.responses_fields import (
    ResponseFields,
)
from penstock.server.protocols.openai.stored_responses import (
    check_stored,
    earlier_items,
    is_background,
    send_input,
    send_stored,
    with_references,
)

if TYPE_CHECKING:
    from penstock.memory.clients.requests import RequestMemory
    from penstock.memory.events import Events
    from penstock.server.http.exchange import Exchange
    from penstock.server.protocols.openai.response_store import ResponseStore
    from penstock.server.protocols.services import Services

log = logging.getLogger(__name__)

decoder = msgspec.json.Decoder(ResponseFields)
_MAX_BACKGROUND = 64
_SHARE = 2  # what is made in the background gets no more than half of what requests may have


async def create(exchange: Exchange, services: Services) -> None:
    """Answer now, as a stream, or in the background."""
    fields, job = await read_request(
        exchange, decoder, lambda fields: _prepare(exchange, fields, services)
    )
    store = services.responses.store
    answer = await exchange.run_in_thread_if_large(
        partial(ResponseAnswer, job, fields, exchange.owner, store)
    )
    if fields.background:
        await services.responses.start(exchange, services, answer)
        await exchange.send_made(lambda: answer.body)
        return
    await respond(exchange, services, job, lambda _: answer, stream=fields.stream)


async def _prepare(exchange: Exchange, fields: ResponseFields, services: Services) -> Job:
    fields.check()
    if not isinstance(fields.input, str):
        store = services.responses.store
        fields.input = await with_references(exchange, fields.input, store)
    if fields.truncation != "auto":
        return await _job(exchange, fields, services)
    try:
        job = await _job(exchange, fields, services)
        door = FrontDoor(services, job.card, exchange.memory, job.prompt_field)
        await door.check(RequestNeed(len(job.prompts[0]), None, job.prompt_field))
    except ContextTooLong as error:
        raise ContextTooLong(
            f"{error.message} `truncation` is auto, but this server drops nothing of the input.",
            param="truncation",
            numbers=error.numbers,
        ) from None
    return job


async def _job(exchange: Exchange, fields: ResponseFields, services: Services) -> Job:
    previous = fields.previous_response_id
    if previous is None:
        asked = await exchange.run_in_thread_if_large(partial(fields.conversation_after, []))
        return await prepare(exchange, asked, services)
    async with earlier_items(exchange, previous, services.responses.store) as earlier:
        # Its own body may be small, but not what it continues.
        convert = partial(fields.conversation_after, earlier)
        asked = await run_in_thread_if_large(exchange.memory.size, convert)
        return await prepare(exchange, asked, services)


async def input_tokens(exchange: Exchange, services: Services) -> None:
    """How many tokens the input comes to; nothing is run or stored."""
    _, job = await read_request(
        exchange, decoder, lambda fields: _prepare(exchange, fields, services)
    )
    counted = sum(map(len, job.prompts))
    await exchange.send_json({"object": "response.input_tokens", "input_tokens": counted})


async def retrieve(exchange: Exchange, services: Services) -> None:
    """A stored response as it is now."""
    await send_stored(exchange, services.responses.store)


async def input_items(exchange: Exchange, services: Services) -> None:
    """What a stored response was asked."""
    await send_input(exchange, services.responses.store)


async def delete(exchange: Exchange, services: Services) -> None:
    """Forget a response; one that is still being made is stopped."""
    response_id = await check_stored(exchange, services.responses.store)
    await services.responses.stop(response_id)
    await services.responses.store.delete(response_id, exchange.owner)
    await exchange.send_json({"id": response_id, "object": "response", "deleted": True})


async def cancel(exchange: Exchange, services: Services) -> None:
    """Stop a response that is being made in the background."""
    if not await is_background(exchange, services.responses.store):
        raise BadRequest("Only a response in the background can be cancelled.")
    await services.responses.stop(exchange.path_params["id"])
    await retrieve(exchange, services)


@dataclass(slots=True)
class _Detached:
    """Who asked for a response that is made in the background, once the client has gone."""

    id: str
    caller: str
    salt: bytes
    memory: RequestMemory
    started: float = field(default_factory=time.monotonic)
    record: dict[str, object] = field(default_factory=dict)
    trace: str = ""


class Responses:
    """What is stored, and what is being made in the background."""

    def __init__(self, store: ResponseStore, events: Events) -> None:
        self.store = store
        self._events = events
        self._running: dict[str, asyncio.Task[None]] = {}
        # What those hold, and such as are being stored for the first time.
        self._own: dict[str, RequestMemory] = {}
        self._recovery: asyncio.Task[None] | None = None
        store.on_change = self._on_store_change

    async def recover(self) -> None:
        """What an earlier server did not finish has failed, and says so. Without a store the server
        serves all the same; this is done when it can be used."""
        self._recovery = asyncio.ensure_future(self._recover())
        await asyncio.wait([self._recovery])

    def _on_store_change(self, trouble: StoreUnavailable | None) -> None:
        if trouble is not None:
            log.error("%s", trouble.message)
            self._events.add("responses not stored", reason=trouble.message)
            return
        self._events.add("responses stored again")
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.ensure_future(self._recover())

    async def _recover(self) -> None:
        with contextlib.suppress(StoreUnavailable):  # which has been said
            await self._fail_unfinished()

    async def _fail_unfinished(self) -> None:
        for stored in await self.store.unfinished():
            if stored.id in self._own:
                continue
            body = msgspec.json.decode(stored.body)
            error = {"code": "server_error", "message": "The server was stopped meanwhile."}
            body |= {"status": "failed", "error": error}
            await self.store.put(
                StoredResponse(
                    stored.id, stored.previous, stored.owner, True,
                    msgspec.json.encode(body), stored.input,
                )
            )  # fmt: skip

    async def start(self, exchange: Exchange, services: Services, answer: ResponseAnswer) -> None:
        """Make it without the client; what it holds of the server's memory stays booked."""
        memory = services.requests.request_memory(exchange.caller)
        self._check_room(memory.client, exchange.memory.size, services.requests.max_bytes)
        origin = _Detached(answer.id, exchange.caller, exchange.salt, memory, trace=exchange.trace)
        self._own[answer.id] = memory
        try:
            memory.grow_now(exchange.memory.size)
            answer.body["status"] = "queued"
            await answer.save(finished=False)
        except BaseException:  # the disk is full, or the client has left
            del self._own[answer.id]
            memory.release()
            raise
        task = asyncio.ensure_future(_make(origin, services, answer))
        self._running[answer.id] = task
        task.add_done_callback(lambda _: self._forget(answer.id))

    def _check_room(self, client: str, size: int, max_bytes: int) -> None:
        """No client has more than is left for others, in number and, but for its first, in bytes;
        so there is always something left for a client that has none."""
        own = [memory.size for memory in self._own.values() if memory.client == client]
        left = _MAX_BACKGROUND - len(self._own)
        left_bytes = max_bytes // _SHARE - sum(memory.size for memory in self._own.values())
        if len(own) >= left or (own and sum(own) + size > left_bytes):
            raise Overloaded(
                f"{len(own)} responses are being made in the background for this client, which "
                f"hold {sum(own)} bytes, and {left} of {_MAX_BACKGROUND} and {max(left_bytes, 0)} "
                "bytes are left for all.",
                retry_after_s=10,
            )

    def _forget(self, response_id: str) -> None:
        del self._running[response_id]
        del self._own[response_id]

    async def stop(self, response_id: str) -> None:
        """End one that is being made; it is stored as cancelled."""
        task = self._running.get(response_id)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        """End all of them, and the file."""
        for response_id in list(self._running):
            await self.stop(response_id)
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.wait([self._recovery])
        await self.store.close()


async def _make(origin: _Detached, services: Services, answer: ResponseAnswer) -> None:
    generation = Generation(origin, services, answer.job)
    collected = Collected(1)
    answer.body["status"] = "in_progress"
    try:
        with contextlib.suppress(StoreUnavailable):  # it is known already; its end is what counts
            await answer.save(finished=False)
        with generation.observed():
            await generation.run(collected)
        answer.document(collected.pieces, generation.usage)
    except asyncio.CancelledError:
        answer.body["status"] = "cancelled"
    except PenstockError as error:
        answer.fail(error)
    except Exception:  # the edge of a task of its own: the client asks later how it went
        log.exception("a response in the background failed", extra={"fields": {"id": answer.id}})
        answer.fail(InternalError("The server made a mistake; its log says more."))
    finally:
        origin.memory.release()
        await answer.save_end()
