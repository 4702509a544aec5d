"""`/admin/api/models`: the models in memory, and what an operator does to them by name.

A load is answered when the model is ready, or with `stream` told as it goes, in server-sent events.
Whoever asked for it and leaves has it called off, unless somebody else waits for the model too or
it was asked for with `detach`.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from penstock.server.admin.views import model_rows, with_settings
from penstock.server.http.errors import event
from penstock.server.http.exchange import decode_json
from penstock.server.pipeline.answers import EVENT_STREAM, KEEP_ALIVE

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from penstock.catalog import Card
    from penstock.server.http.exchange import Exchange
    from penstock.server.protocols.services import Services

_LOOK_S = 0.1  # how often the progress of a load is looked at


class LoadFields(msgspec.Struct):
    """The body of a load; it may be left out, as the others may."""

    stream: bool = False
    detach: bool = False  # once its process runs, it goes on when whoever asked for it has left


class UnloadFields(msgspec.Struct):
    """The body of an unload."""

    now: bool = False  # cut running answers off


class PinFields(msgspec.Struct):
    """The body of a pin."""

    pinned: bool = True


_load_decoder = msgspec.json.Decoder(LoadFields)
_unload_decoder = msgspec.json.Decoder(UnloadFields)
_pin_decoder = msgspec.json.Decoder(PinFields)


async def resident_models(exchange: Exchange, services: Services) -> None:
    """What `penstock ps` shows."""
    await exchange.send_json(model_rows(services))


async def load(exchange: Exchange, services: Services) -> None:
    """Have a model ready."""
    async with exchange.body() as body:
        fields = await decode_json(_load_decoder, body or b"{}")
    await services.make(exchange.path_params["id"])
    card = await services.served(exchange.path_params["id"])
    exchange.record["model"] = card.name
    work = _detached(card, services) if fields.detach else services.residency.load(card.name)
    if fields.stream:
        await exchange.while_connected(_stream_load(exchange, services, card, work))
    else:
        await exchange.while_connected(work)
        await exchange.send_json(_row(card, services))


async def _detached(card: Card, services: Services) -> None:
    """Wait as a request does."""
    async with services.residency.lease(card.name):
        pass


async def unload(exchange: Exchange, services: Services) -> None:
    """End a model's process, when its answers are done or now."""
    async with exchange.body() as body:
        fields = await decode_json(_unload_decoder, body or b"{}")
    card = await services.find(exchange.path_params["id"])
    exchange.record["model"] = card.name
    work = services.residency.unload(card.name, now=fields.now)
    unloaded = await exchange.while_connected(work)
    await exchange.send_json({"name": card.name, "unloaded": unloaded})


async def pin(exchange: Exchange, services: Services) -> None:
    """Keep a model once it is loaded, or no longer."""
    async with exchange.body() as body:
        fields = await decode_json(_pin_decoder, body or b"{}")
    card = await services.find(exchange.path_params["id"])
    exchange.record["model"] = card.name
    await services.residency.pin(card.name, pinned=fields.pinned)
    await exchange.send_json(_row(card, services))


async def _stream_load(
    exchange: Exchange, services: Services, card: Card, work: Coroutine[None, None, None]
) -> None:
    """An event for each step of the way; the last is the model's row. What fails before the first
    is refused with its status."""
    task = asyncio.ensure_future(work)
    told, told_at = None, time.monotonic()
    try:
        while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
            progress = _row(card, services).get("progress")
            news = progress is not None and progress != told  # none: it has just come to its end
            silent_s = time.monotonic() - told_at
            if not news and silent_s < services.config.server.keepalive_after_s:
                continue
            await _write(exchange, event(progress) if news else KEEP_ALIVE)
            told, told_at = progress if news else told, time.monotonic()
        await task
        await _write(exchange, event(_row(card, services)), more=False)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _write(exchange: Exchange, content: bytes, *, more: bool = True) -> None:
    if exchange.status is None:
        await exchange.begin(200, {"content-type": EVENT_STREAM, "cache-control": "no-store"})
    await exchange.write(content, more=more)


def _row(card: Card, services: Services) -> dict[str, object]:
    own: dict[str, object] = {"name": card.name, "state": "absent"}
    own |= next((row for row in services.residency.snapshot() if row["name"] == card.name), {})
    return with_settings(own, services)
