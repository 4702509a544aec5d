"""`/admin/api/models`: the models in memory, and what an operator does to them by name.

A load is answered when the model is ready, or with `stream` told as it goes, in server-sent events.
Whoever asked for it and leaves has it called off, unless somebody else waits for the model too.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from penstock.server.api.answers import EVENT_STREAM, KEEP_ALIVE
from penstock.server.api.errors import event
from penstock.server.api.exchange import decode_json

if TYPE_CHECKING:
    from penstock.catalog import Card
    from penstock.server.api.exchange import Exchange
    from penstock.server.api.services import Services

_LOOK_S = 0.1  # how often the progress of a load is looked at


class LoadFields(msgspec.Struct):
    """The body of a load; it may be left out, as the others may."""

    stream: bool = False


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
    await exchange.send_json([_with_settings(row, services) for row in _rows(services)])


async def load(exchange: Exchange, services: Services) -> None:
    """Have a model ready."""
    async with exchange.body() as body:
        fields = await decode_json(_load_decoder, body or b"{}")
    card = await services.generator(exchange.path_params["id"])
    if fields.stream:
        await exchange.while_connected(_stream_load(exchange, services, card))
    else:
        await exchange.while_connected(services.residency.load(card.name))
        await exchange.send_json(_row(card, services))


async def unload(exchange: Exchange, services: Services) -> None:
    """End a model's process, when its answers are done or now."""
    async with exchange.body() as body:
        fields = await decode_json(_unload_decoder, body or b"{}")
    card = await services.find(exchange.path_params["id"])
    work = services.residency.unload(card.name, now=fields.now)
    unloaded = await exchange.while_connected(work)
    await exchange.send_json({"name": card.name, "unloaded": unloaded})


async def pin(exchange: Exchange, services: Services) -> None:
    """Keep a model once it is loaded, or no longer."""
    async with exchange.body() as body:
        fields = await decode_json(_pin_decoder, body or b"{}")
    card = await services.find(exchange.path_params["id"])
    await services.residency.pin(card.name, pinned=fields.pinned)
    await exchange.send_json(_row(card, services))


async def _stream_load(exchange: Exchange, services: Services, card: Card) -> None:
    """An event for each step of the way; the last is the model's row. What fails before the first
    is refused with its status."""
    task = asyncio.ensure_future(services.residency.load(card.name))
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


def _rows(services: Services) -> list[dict[str, object]]:
    return services.residency.snapshot()


def _row(card: Card, services: Services) -> dict[str, object]:
    own: dict[str, object] = {"name": card.name, "state": "absent"}
    own |= next((row for row in _rows(services) if row["name"] == card.name), {})
    return _with_settings(own, services)


def _with_settings(row: dict[str, object], services: Services) -> dict[str, object]:
    settings = services.config.models.settings(str(row["name"]))
    return row | {"aliases": settings.alias, "ttl_s": settings.ttl or None}
