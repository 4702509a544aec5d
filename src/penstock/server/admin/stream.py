"""`/admin/api/stream`: rows of what happens and of how things stand, for pages and terminals.

One task makes the rows, once a second and only while somebody reads; readers are sent the same
bytes. So the cost of watching hardly depends on how many watch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from penstock.errors import BadRequest, shortened
from penstock.server.admin.query import query_of
from penstock.server.admin.views import domain_figures, stream_states
from penstock.server.observe.broadcast import BATCH_BYTES
from penstock.server.pipeline.answers import EVENT_STREAM, KEEP_ALIVE

if TYPE_CHECKING:
    from penstock.server.http.exchange import Exchange
    from penstock.server.observe.broadcast import Broadcast
    from penstock.server.protocols.services import Services

log = logging.getLogger(__name__)

KINDS = ("event", "refusal", "memory", "models", "requests", "tasks", "timeline")
_TICK_S = 1.0
_BATCH_S = 0.05  # rows that come shortly after another are sent with it
_MAX_DIGITS = 16


async def watch(services: Services) -> None:
    """Make the rows until cancelled."""
    while True:
        try:
            _make_rows(services)
        except Exception:  # the edge of a task of its own: the next second's rows may be made
            log.exception("rows of /admin/api/stream could not be made")
        await asyncio.sleep(_TICK_S)


def _make_rows(services: Services) -> None:
    records = services.records
    if (point := records.timeline.note(time.time(), domain_figures(services))) is not None:
        records.broadcast.append("timeline", point)
    records.rates.note(time.monotonic(), services.metrics.generated)
    if records.broadcast.readers:
        _tell_states(services)
    else:
        records.broadcast.forget_states()


def _tell_states(services: Services) -> None:
    for kind, state in stream_states(services).items():
        services.records.broadcast.replace(kind, state)


async def stream(exchange: Exchange, services: Services) -> None:
    """The endpoint: rows since the one that the reader names, and on."""
    query = query_of(exchange)
    kinds = _kinds(query.get("kinds"))
    cursor = _cursor(query.get("since") or exchange.header(b"last-event-id"))
    async with exchange.body():
        pass  # there is none; from here on the client's leaving is noticed
    with services.records.broadcast.reading() as broadcast:
        await exchange.memory.grow(2 * BATCH_BYTES)  # what it is sent, and on its way
        if broadcast.readers == 1:
            _tell_states(services)
        send = _send(exchange, broadcast, kinds, cursor, services.config.server.keepalive_after_s)
        await exchange.while_connected(send)


async def _send(
    exchange: Exchange,
    broadcast: Broadcast,
    kinds: frozenset[str] | None,
    cursor: int | None,
    silence_s: float,
) -> None:
    headers = {
        "content-type": EVENT_STREAM,
        "cache-control": "no-store",
        "x-accel-buffering": "no",  # a proxy in front must not hold rows back
    }
    await exchange.begin(200, headers)
    while True:
        news = broadcast.since(cursor, kinds)
        cursor = news.cursor
        if news.frames:
            await exchange.write(news.frames)
        try:
            async with asyncio.timeout(silence_s):
                if not await broadcast.wait(cursor):
                    break
                await asyncio.sleep(_BATCH_S)
        except TimeoutError:
            await exchange.write(KEEP_ALIVE)
    await exchange.write(b"", more=False)


def _kinds(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    kinds = frozenset(text.split(","))
    if unknown := kinds - frozenset(KINDS):
        raise BadRequest(
            f"`kinds` has {shortened(min(unknown), 40)!r}; the kinds of rows are "
            f"{', '.join(KINDS)}.",
            param="kinds",
        )
    return kinds


def _cursor(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise BadRequest(
            f"`since` is {shortened(text, 40)!r}; it is the id of a row that was sent before.",
            param="since",
        )
    return int(text)
