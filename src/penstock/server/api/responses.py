"""OpenAI's `/v1/responses`: answers as items, stored, continued by their id, in the background."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import BadRequest, InternalError, Overloaded, PenstockError
from penstock.server.api.answers import EVENT_STREAM, KEEP_ALIVE, Collected, collect, send_stream
from penstock.server.api.conversation import prepare
from penstock.server.api.errors import event
from penstock.server.api.exchange import decode_json
from penstock.server.api.generation import Finish, Generation, Job, Piece
from penstock.server.api.responses_fields import ResponseFields, function_tools, namespaces
from penstock.server.api.responses_items import OutputItems
from penstock.server.api.stored import (
    check_stored,
    earlier_items,
    is_background,
    send_input,
    send_stored,
)
from penstock.server.response_store import StoredResponse

if TYPE_CHECKING:
    from penstock.memory.requests import Share
    from penstock.server.api.exchange import Exchange
    from penstock.server.api.generation import Usage
    from penstock.server.api.services import Services
    from penstock.server.response_store import ResponseStore

log = logging.getLogger(__name__)

decoder = msgspec.json.Decoder(ResponseFields)
_MOST_BACKGROUND = 64


async def create(exchange: Exchange, services: Services) -> None:
    """Answer now, as a stream, or in the background."""
    async with exchange.body() as body:
        fields = await decode_json(decoder, body)
        fields.check()
        work = _prepare(exchange, fields, services)
        job = await exchange.while_connected(work)
    generation = Generation(exchange, services, job)
    answer = _Answer(job, fields, exchange.owner, services.responses.store)
    if fields.background:
        await services.responses.start(exchange, services, answer)
        await exchange.send_json(answer.body)
        return
    with services.metrics.observe(exchange, generation, job.card.name):
        if fields.stream:
            keepalive_after_s = services.config.server.keepalive_after_s
            # Stored before the last event is sent, so that a client can go on from it at once.
            await send_stream(exchange, generation, answer, keepalive_after_s)
        else:
            [pieces] = await collect(exchange, generation, 1)
            answer.take_whole(pieces, generation.usage)
            await answer.save()
            await exchange.send_json(answer.body)


async def _prepare(exchange: Exchange, fields: ResponseFields, services: Services) -> Job:
    previous = fields.previous_response_id
    if previous is None:
        asked = await exchange.apart(partial(fields.conversation_after, []))
        return await prepare(exchange, asked, services)
    async with earlier_items(exchange, previous, services.responses.store) as earlier:
        asked = await exchange.apart(partial(fields.conversation_after, earlier))
        return await prepare(exchange, asked, services)


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

    caller: str
    salt: bytes
    share: Share
    started: float = field(default_factory=time.monotonic)
    record: dict[str, object] = field(default_factory=dict)


class Responses:
    """What is stored, and what is being made in the background."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self._running: dict[str, asyncio.Task[None]] = {}
        self._starting = 0  # being stored for the first time

    async def recover(self) -> None:
        """What an earlier server did not finish has failed, and says so."""
        for stored in await self.store.unfinished():
            body = msgspec.json.decode(stored.body)
            error = {"code": "server_error", "message": "The server was stopped meanwhile."}
            body |= {"status": "failed", "error": error}
            await self.store.put(
                StoredResponse(
                    stored.id, stored.previous, stored.owner, True,
                    msgspec.json.encode(body), stored.input,
                )
            )  # fmt: skip

    async def start(self, exchange: Exchange, services: Services, answer: _Answer) -> None:
        """Make it without the client; what it holds of the server's memory stays booked."""
        if len(self._running) + self._starting >= _MOST_BACKGROUND:
            raise Overloaded(
                f"{_MOST_BACKGROUND} responses are being made in the background already.",
                retry_after_s=10,
            )
        share = services.requests.share()
        origin = _Detached(exchange.caller, exchange.salt, share)
        self._starting += 1
        try:
            share.grow_now(exchange.share.size)
            answer.body["status"] = "queued"
            await answer.save(finished=False)
        except BaseException:  # the disk is full, or the client has left
            share.release()
            raise
        finally:
            self._starting -= 1
        task = asyncio.ensure_future(_make(origin, services, answer))
        self._running[answer.id] = task
        task.add_done_callback(lambda _: self._running.pop(answer.id, None))

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
        await self.store.close()


async def _make(origin: _Detached, services: Services, answer: _Answer) -> None:
    generation = Generation(origin, services, answer.job)
    collected = Collected(1)
    answer.body["status"] = "in_progress"
    try:
        await answer.save(finished=False)
        with services.metrics.observe(origin, generation, answer.job.card.name):
            await generation.run(collected)
        answer.take_whole(collected.pieces[0], generation.usage)
    except asyncio.CancelledError:
        answer.body["status"] = "cancelled"
    except PenstockError as error:
        answer.fail(error)
    except Exception:  # the edge of a task of its own: the client asks later how it went
        log.exception("a response in the background failed", extra={"fields": {"id": answer.id}})
        answer.fail(InternalError("The server made a mistake; its log says more."))
    finally:
        origin.share.release()
        await answer.save()


class _Answer:
    """A response: its body as it grows, and its events."""

    media_type = EVENT_STREAM
    keep_alive = KEEP_ALIVE

    def __init__(self, job: Job, fields: ResponseFields, owner: str, store: ResponseStore) -> None:
        self.job = job
        self.id = f"resp_{secrets.token_hex(24)}"
        self.body = _body(self.id, job, fields)
        self._owner = owner
        self._store = store if fields.store is not False else None
        self._input = msgspec.json.encode(fields.items())
        self._items = OutputItems(namespaces(fields.tools))
        self._finish: Finish | None = None
        self._number = 0  # of the next event

    # --- whole ---------------------------------------------------------------------------------

    def take_whole(self, pieces: list[Piece], usage: Usage) -> None:
        """The answer of a request that does not stream."""
        for piece in pieces:
            for part in piece.parts:
                self._items.take(part)
            self._finish = piece.finish
        self._end(usage)

    def fail(self, error: PenstockError) -> None:
        """It could not be made."""
        self._items.finish("incomplete")
        self.body |= {
            "status": "failed",
            "output": self._items.items,
            "error": {"code": error.code, "message": error.message},
        }

    async def save(self, *, finished: bool = True) -> None:
        """Store it as it is."""
        if self._store is None:
            return
        body = msgspec.json.encode(self.body)
        previous = self.body["previous_response_id"]
        await self._store.put(
            StoredResponse(self.id, previous, self._owner, finished, body, self._input)
        )

    def _end(self, usage: Usage) -> list[dict[str, Any]]:
        cut_short = self._finish is Finish.LENGTH
        status = "incomplete" if cut_short else "completed"
        events = self._items.finish(status)
        self.body |= {
            "status": status,
            "completed_at": None if cut_short else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut_short else None,
            "output": self._items.items,
            "usage": _usage(usage),
        }
        return events

    # --- streamed ------------------------------------------------------------------------------

    def opening(self, usage: Usage) -> bytes:
        """The response before it has said anything."""
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._say({"type": kind, "response": self.body}) for kind in kinds)

    def events(self, piece: Piece) -> bytes:
        """The events of one piece."""
        self._finish = piece.finish
        return b"".join(self._say(each) for part in piece.parts for each in self._items.take(part))

    async def closing(self, usage: Usage) -> bytes:
        """The end of the last item, and the response as it is stored."""
        said = b"".join(self._say(each) for each in self._end(usage))
        await self.save()
        return said + self._say({"type": f"response.{self.body['status']}", "response": self.body})

    def failing(self, error: PenstockError) -> bytes:
        """The response as far as it came, and why not further."""
        self.fail(error)
        return self._say({"type": "response.failed", "response": self.body})

    def _say(self, content: dict[str, Any]) -> bytes:
        numbered = {**content, "sequence_number": self._number}
        self._number += 1
        return event(numbered, str(content["type"]))


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _body(response_id: str, job: Job, fields: ResponseFields) -> dict[str, Any]:
    """The response as it begins, with what was asked for repeated in it."""
    reasoning = fields.reasoning
    wanted = None if fields.text is None else fields.text.format
    text_format: dict[str, Any] = {"type": "text"}
    if wanted is not None and wanted.type != "text":
        text_format = {"type": wanted.type}
        if wanted.type == "json_schema":
            schema = msgspec.json.decode(bytes(wanted.schema))
            text_format |= {"name": wanted.name, "schema": schema, "strict": wanted.strict}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(fields.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "model": job.card.name,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "store": fields.store is not False,
        "temperature": job.sampling.temperature,
        "text": {"format": text_format},
        "tool_choice": fields.tool_choice or "auto",
        "tools": [
            {"type": "function", "strict": tool.strict, **tool.definition["function"]}
            for tool in function_tools(fields.tools)
        ],
        "top_p": job.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }
