"""Ollama's `/api/chat` and `/api/generate`. They stream unless told otherwise, and a request that
says nothing only has the model loaded or unloaded. The routes about models are in `models`.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from penstock.errors import BadRequest, Forbidden
from penstock.memory.admission import RequestNeed
from penstock.memory.clients.requests import TOKEN_BYTES
from penstock.server.fields.generation import check_token_ids
from penstock.server.http.threads import run_in_thread_if_large
from penstock.server.pipeline.answers import read_request, respond
from penstock.server.pipeline.conversation import prepare
from penstock.server.pipeline.front_door import FrontDoor
from penstock.server.protocols.ollama.answer import ChatAnswer, GenerateAnswer, OllamaAnswer
from penstock.server.protocols.ollama.fields import (
    OllamaChatFields,
    OllamaGenerateFields,
    OllamaRequest,
    RawFields,
)
from penstock.server.protocols.openai import completions
from penstock.server.protocols.prompts import decode_ids

if TYPE_CHECKING:
    from penstock.server.http.exchange import Exchange
    from penstock.server.pipeline.generation import Job
    from penstock.server.protocols.services import Services

_Fields = TypeVar("_Fields", bound=OllamaRequest)
_chat_decoder = msgspec.json.Decoder(OllamaChatFields)
_WIDE_BYTES = 4  # of a character, where one of the text is far from Latin
_generate_decoder = msgspec.json.Decoder(OllamaGenerateFields)


async def chat(exchange: Exchange, services: Services) -> None:
    """`/api/chat`."""
    await _respond(exchange, services, _chat_decoder, ChatAnswer)


async def generate(exchange: Exchange, services: Services) -> None:
    """`/api/generate`."""
    await _respond(exchange, services, _generate_decoder, GenerateAnswer)


async def _respond(
    exchange: Exchange,
    services: Services,
    decoder: msgspec.json.Decoder[_Fields],
    form: type[OllamaAnswer],
) -> None:
    fields, job = await read_request(
        exchange, decoder, lambda fields: _prepare(exchange, fields, services)
    )
    keep_s = fields.keep_alive_s()
    if job is None:
        await _load_or_unload(exchange, services, fields.model, keep_s, form)
        return
    try:
        write = partial(form, fields, job, exchange.memory)
        await respond(exchange, services, job, write, stream=fields.stream is not False)
    finally:
        services.keep_alive(job.card, keep_s)


async def _prepare(exchange: Exchange, fields: OllamaRequest, services: Services) -> Job | None:
    """The job; None where nothing is to be generated."""
    fields.check()
    fields.keep_alive_s()  # refuses what is no duration
    if fields.is_empty:
        await _check_unused(exchange, fields, services)
        return None
    if not isinstance(fields, OllamaGenerateFields):
        return await prepare(
            exchange, await exchange.run_in_thread_if_large(fields.conversation), services
        )
    text = await _as_text(exchange, fields)
    if text is not None:
        job = await completions.prepare(exchange, text, services)
    else:
        job = await prepare(
            exchange, await exchange.run_in_thread_if_large(fields.conversation), services
        )
    read = partial(decode_ids, fields.context, job.card.context, "context")
    earlier = await exchange.run_in_thread_if_large(read)
    if not earlier:
        return job
    door = FrontDoor(services, job.card, exchange.memory, "context")
    await door.check(RequestNeed(len(earlier) + len(job.prompts[0]), None, "context"))
    await exchange.memory.grow(TOKEN_BYTES * len(earlier))
    await exchange.run_in_thread_if_large(
        partial(check_token_ids, earlier, job.card.vocab_size, "context")
    )
    return dataclasses.replace(job, prompts=[[*earlier, *job.prompts[0]]])


async def _as_text(exchange: Exchange, fields: OllamaGenerateFields) -> RawFields | None:
    """The text to be continued; what a template makes of a body is booked before it is made."""
    pieces = await exchange.run_in_thread_if_large(fields.written)
    if pieces is None:
        return None
    length, most = sum(map(len, pieces)), exchange.limits.max_bytes
    if length > most:
        raise BadRequest(
            f"`template` makes a prompt of {length} characters; at most {most} are allowed "
            "(server.max_body).",
            param="template",
        )
    if len(pieces) > 1:
        wide = not all(map(str.isascii, pieces))
        await exchange.memory.grow(length * (_WIDE_BYTES if wide else 1))
    return await run_in_thread_if_large(length, partial(fields.as_text, pieces))


async def _check_unused(exchange: Exchange, fields: OllamaRequest, services: Services) -> None:
    """Refuse what could not be used if there were a question: nothing else reads it."""
    card = await services.generator(fields.model)
    if isinstance(fields, OllamaGenerateFields):
        await _as_text(exchange, fields)
        read = partial(decode_ids, fields.context, card.context, "context")
        await exchange.run_in_thread_if_large(read)
    await exchange.run_in_thread_if_large(fields.conversation)


async def _load_or_unload(
    exchange: Exchange,
    services: Services,
    name: str,
    keep_s: float | None,
    form: type[OllamaAnswer],
) -> None:
    card = await services.generator(name)
    if keep_s == 0:
        if not services.honours_keep_alive(card):
            raise Forbidden(
                "`keep_alive` of clients does not unload models here (models.keep_alive); the "
                "operator does, with `penstock unload`."
            )
        await exchange.while_connected(services.residency.unload(card.name))
    else:
        await exchange.while_connected(services.residency.load(card.name))
        services.keep_alive(card, keep_s)
    await exchange.send_json(form.nothing(name, "unload" if keep_s == 0 else "load"))
