"""Stored responses on their way back into memory.

Their bytes are booked before they are read and until nobody needs them any more; large ones are
decoded beside the event loop.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import BadRequest, UnknownResponse, shortened
from penstock.memory.clients.json_weight import BODY_FACTOR, decoded_bytes
from penstock.server.http.threads import run_in_thread_if_large
from penstock.server.protocols.openai.responses_input import Item
from penstock.server.protocols.openai.responses_items import response_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from penstock.memory.clients.requests import RequestMemory
    from penstock.server.http.exchange import Exchange
    from penstock.server.protocols.openai.response_store import ResponseStore, StoredResponse

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
    async with _booked(exchange.memory, BODY_FACTOR * size):
        chain = await store.chain(previous, exchange.owner, _LONGEST_CHAIN)
        if chain is None:
            raise _not_stored(previous)
        needed = await run_in_thread_if_large(size, partial(_decoded_bytes, chain))
        async with _booked(exchange.memory, needed - BODY_FACTOR * size):
            yield await run_in_thread_if_large(size, partial(_items, chain))


async def with_references(
    exchange: Exchange, items: list[Item], store: ResponseStore
) -> list[Item]:
    """The items of an input, those that are only named taken from the responses they are part of.
    What these take is booked until the request ends."""
    wanted = await exchange.run_in_thread_if_large(partial(_referenced, items))
    found: dict[str, Item] = {}
    for response_id, ids in wanted.items():
        found |= await _picked(exchange, response_id, set(ids), store)
    if not wanted:
        return items
    for index, item_id in ((index, i) for ids in wanted.values() for i, index in ids.items()):
        if item_id not in found:
            raise _no_item(item_id, index)
    return [found[item.id or ""] if item.is_reference else item for item in items]


async def _picked(
    exchange: Exchange, response_id: str, ids: set[str], store: ResponseStore
) -> dict[str, Item]:
    """Those items of one response."""
    size = await store.length(response_id, exchange.owner)
    if size is None:
        return {}
    async with _booked(exchange.memory, BODY_FACTOR * size):
        stored = await store.get(response_id, exchange.owner)
        if stored is None:
            return {}
        needed = await run_in_thread_if_large(size, partial(_decoded_bytes, [stored]))
        async with _booked(exchange.memory, needed - BODY_FACTOR * size):
            pick = partial(_items_by_id, stored, ids)
            found, kept_bytes = await run_in_thread_if_large(size, pick)
            await exchange.memory.grow(kept_bytes)
            return found


async def send_stored(exchange: Exchange, store: ResponseStore) -> None:
    """Answer with the response that the address names, as it is now."""
    async with _found(exchange, store, _SENT_FACTOR) as stored:
        await exchange.send_bytes(stored.body, "application/json")


async def send_input(exchange: Exchange, store: ResponseStore) -> None:
    """Answer with what that response was asked, the latest first."""
    async with _found(exchange, store, BODY_FACTOR) as stored:
        size = len(stored.input)
        needed = await run_in_thread_if_large(size, partial(decoded_bytes, stored.input))
        async with _booked(exchange.memory, needed - BODY_FACTOR * size):
            page = await run_in_thread_if_large(size, partial(_page, stored))
            await exchange.send_bytes(page, "application/json")


async def is_background(exchange: Exchange, store: ResponseStore) -> bool:
    """Whether that response was to be made without its client."""
    async with _found(exchange, store, _SENT_FACTOR) as stored:
        return (
            await run_in_thread_if_large(len(stored.body), partial(_kind.decode, stored.body))
        ).background


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
    async with _booked(exchange.memory, factor * size):
        stored = await store.get(response_id, owner)
        if stored is None:
            raise _unknown(response_id)
        # One that is being made may have come to its end in between.
        grown = len(stored.body) + len(stored.input) - size
        async with _booked(exchange.memory, factor * grown):
            yield stored


@asynccontextmanager
async def _booked(memory: RequestMemory, size: int) -> AsyncIterator[None]:
    """So much more is held until the block ends."""
    size = max(size, 0)
    if size:  # or it would stand in line for nothing
        await memory.grow(size)
    try:
        yield
    finally:
        memory.shrink(size)


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


def _referenced(items: list[Item]) -> dict[str, dict[str, int]]:
    """Which items are only named, and at which place, by the response that has them."""
    wanted: dict[str, dict[str, int]] = {}
    for index, item in enumerate(items):
        if not item.is_reference or item.id is None:
            continue
        response_id = response_of(item.id)
        if response_id is None:
            raise _no_item(item.id, index)
        if item.id in wanted.setdefault(response_id, {}):
            raise BadRequest(
                f"`input[{index}]` names {shortened(item.id)!r} again.", param=f"input[{index}]"
            )
        wanted[response_id][item.id] = index
    if len(wanted) > _LONGEST_CHAIN:
        raise BadRequest(
            f"`input` names items of {len(wanted)} responses; at most {_LONGEST_CHAIN} are "
            "allowed.",
            param="input",
        )
    return wanted


def _items_by_id(stored: StoredResponse, ids: set[str]) -> tuple[dict[str, Item], int]:
    """The items that have them, and what these come to."""
    found = {item.id: item for item in _said.decode(stored.body).output if item.id in ids}
    for number, item in enumerate(_inputs.decode(stored.input)):
        if (item_id := _listed_id(stored.id, number, item.id)) in ids:
            found[item_id] = item
    return (
        {item_id: item for item_id, item in found.items() if item_id is not None},
        decoded_bytes(msgspec.json.encode(list(found.values()))),
    )


def _listed_id(response_id: str, number: int, own: str | None) -> str:
    return own or f"{response_id}_in_{number}"


def _page(stored: StoredResponse) -> bytes:
    items = [
        _listed(item, _listed_id(stored.id, number, item.get("id")))
        for number, item in enumerate(msgspec.json.decode(stored.input))
    ]
    ids = [item["id"] for item in items] or [None]
    page = {"object": "list", "data": items[::-1], "has_more": False}
    return msgspec.json.encode({**page, "first_id": ids[-1], "last_id": ids[0]})


def _listed(item: dict[str, Any], item_id: str) -> dict[str, Any]:
    """An item as OpenAI lists it: with an id and a status, a message's content as a list."""
    item = {"type": "message", "status": "completed", **item, "id": item_id}
    if item["type"] == "message" and isinstance(text := item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": kind, "text": text}]
    return item


def _not_stored(previous: str) -> BadRequest:
    return BadRequest(
        f"`previous_response_id` {shortened(previous)!r} is not stored here, or one that it "
        "continues is not any more (server.stored_responses).",
        param="previous_response_id",
    )


def _no_item(item_id: str, index: int) -> UnknownResponse:
    return UnknownResponse(
        f"`input[{index}]` names {shortened(item_id)!r}, and there is no stored response with an "
        "item of that id.",
        param=f"input[{index}].id",
    )


def _unknown(response_id: str) -> UnknownResponse:
    return UnknownResponse(f"There is no response {shortened(response_id)!r}.")
