"""Stored responses on their way back into memory.

Their bytes are booked before they are read and until nobody needs them any more; large ones are
decoded beside the event loop.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import BadRequest, UnknownResponse
from penstock.memory.requests import BODY_FACTOR, decoded_bytes
from penstock.server.api.exchange import beside
from penstock.server.api.responses_fields import Item

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from penstock.memory.requests import Share
    from penstock.server.api.exchange import Exchange
    from penstock.server.response_store import ResponseStore, StoredResponse

_LONGEST_CHAIN = 1000
_SENT_FACTOR = 2  # as it was read, and on its way to the client


class _Said(msgspec.Struct):
    status: str
    output: list[Item]


class _Kind(msgspec.Struct):
    background: bool


_inputs = msgspec.json.Decoder(list[Item])
_said = msgspec.json.Decoder(_Said)
_kind = msgspec.json.Decoder(_Kind)


@asynccontextmanager
async def earlier_items(
    exchange: Exchange, previous: str, store: ResponseStore
) -> AsyncIterator[list[Item]]:
    """All items of the conversation that a response ended."""
    size = await store.length(previous, exchange.owner, _LONGEST_CHAIN)
    if size is None:
        raise _not_stored(previous)
    async with _booked(exchange.share, BODY_FACTOR * size):
        chain = await store.chain(previous, exchange.owner, _LONGEST_CHAIN)
        if chain is None:
            raise _not_stored(previous)
        needed = await beside(size, partial(_decoded_bytes, chain))
        async with _booked(exchange.share, needed - BODY_FACTOR * size):
            yield await beside(size, partial(_items, chain))


async def send_stored(exchange: Exchange, store: ResponseStore) -> None:
    """Answer with the response that the address names, as it is now."""
    async with _found(exchange, store, _SENT_FACTOR) as stored:
        await exchange.send_bytes(stored.body, "application/json")


async def send_input(exchange: Exchange, store: ResponseStore) -> None:
    """Answer with what that response was asked, the latest first."""
    async with _found(exchange, store, BODY_FACTOR) as stored:
        size = len(stored.input)
        needed = await beside(size, partial(decoded_bytes, stored.input))
        async with _booked(exchange.share, needed - BODY_FACTOR * size):
            page = await beside(size, partial(_page, stored))
            await exchange.send_bytes(page, "application/json")


async def is_background(exchange: Exchange, store: ResponseStore) -> bool:
    """Whether that response was to be made without its client."""
    async with _found(exchange, store, _SENT_FACTOR) as stored:
        return (await beside(len(stored.body), partial(_kind.decode, stored.body))).background


async def check_stored(exchange: Exchange, store: ResponseStore) -> str:
    """The id of the response that the address names; `UnknownResponse` if there is none."""
    response_id = exchange.path_params["id"]
    if await store.length(response_id, exchange.owner) is None:
        raise _unknown(response_id)
    return response_id


@asynccontextmanager
async def _found(
    exchange: Exchange, store: ResponseStore, factor: int
) -> AsyncIterator[StoredResponse]:
    """The response that the address names, booked `factor` times."""
    response_id, owner = exchange.path_params["id"], exchange.owner
    size = await store.length(response_id, owner)
    if size is None:
        raise _unknown(response_id)
    async with _booked(exchange.share, factor * size):
        stored = await store.get(response_id, owner)
        if stored is None:
            raise _unknown(response_id)
        # One that is being made may have come to its end in between.
        grown = len(stored.body) + len(stored.input) - size
        async with _booked(exchange.share, factor * grown):
            yield stored


@asynccontextmanager
async def _booked(share: Share, size: int) -> AsyncIterator[None]:
    """So much more is held until the block ends."""
    size = max(size, 0)
    if size:  # or it would stand in line for nothing
        await share.grow(size)
    try:
        yield
    finally:
        share.shrink(size)


def _decoded_bytes(chain: list[StoredResponse]) -> int:
    return sum(decoded_bytes(each.input) + decoded_bytes(each.body) for each in chain)


def _items(chain: list[StoredResponse]) -> list[Item]:
    items: list[Item] = []
    for stored in chain:
        items += _inputs.decode(stored.input)
        said = _said.decode(stored.body)
        if said.status in ("queued", "in_progress"):
            raise BadRequest(
                f"The response {stored.id!r} is not finished yet.", param="previous_response_id"
            )
        items += said.output
    return items


def _page(stored: StoredResponse) -> bytes:
    items = [
        {"id": item.get("id") or f"{stored.id}_in_{number}", "type": "message", **item}
        for number, item in enumerate(msgspec.json.decode(stored.input))
    ]
    ids = [item["id"] for item in items] or [None]
    page = {"object": "list", "data": items[::-1], "has_more": False}
    return msgspec.json.encode({**page, "first_id": ids[-1], "last_id": ids[0]})


def _not_stored(previous: str) -> BadRequest:
    return BadRequest(
        f"`previous_response_id` {previous[:80]!r} is not stored here, or one that it "
        "continues is not any more (server.stored_responses).",
        param="previous_response_id",
    )


def _unknown(response_id: str) -> UnknownResponse:
    return UnknownResponse(f"There is no response {response_id[:80]!r}.")
