"""`/v1/models`: which models a request may name, in OpenAI's shape, or in Anthropic's for clients
that send their header.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from penstock.errors import BadRequest
from penstock.server.http.errors import ANTHROPIC
from penstock.server.http.threads import read_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.catalog import Card
    from penstock.server.http.exchange import Exchange
    from penstock.server.protocols.services import Services

_PAGE, _LARGEST_PAGE = 20, 1000  # as Anthropic's own servers have it


async def list_models(exchange: Exchange, services: Services) -> None:
    """All models on disk, each under every name it has."""
    cards = await read_files((services.catalog, "all"), services.catalog.scan)
    named = [
        (name, card)
        for card in services.reachable(cards)
        for name in (card.name, *services.settings(card).alias)
    ]
    if exchange.style is ANTHROPIC:
        await exchange.send_json(_page(named, exchange.scope["query_string"]))
        return
    models = [_model(card, services, name) for name, card in named]
    await exchange.send_json({"object": "list", "data": models})


async def show_model(exchange: Exchange, services: Services) -> None:
    """One of them."""
    name = exchange.path_params["id"]
    card = await services.find(name)
    own = exchange.style is ANTHROPIC
    await exchange.send_json(_anthropic(card, name) if own else _model(card, services, name))


def _page(named: Sequence[tuple[str, Card]], query: bytes) -> dict[str, object]:
    """A page of Anthropic's list: after or before a model, so many."""
    asked = {name: values[-1] for name, values in parse_qs(query.decode("latin-1")).items()}
    limit = asked.get("limit", str(_PAGE))
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _LARGEST_PAGE):
        raise BadRequest(f"`limit` is a number from 1 to {_LARGEST_PAGE}.", param="limit")
    ids = [name for name, _ in named]
    begin, end = 0, len(named)
    if (after := asked.get("after_id")) in ids:
        begin = ids.index(after) + 1
    if (before := asked.get("before_id")) in ids:
        end = ids.index(before)
        begin = max(begin, end - int(limit))
    chosen = named[begin:end][: int(limit)]
    more = begin > 0 if before is not None else begin + len(chosen) < end
    return {
        "data": [_anthropic(card, name) for name, card in chosen],
        "first_id": chosen[0][0] if chosen else None,
        "last_id": chosen[-1][0] if chosen else None,
        "has_more": more,
    }


def _anthropic(card: Card, name: str) -> dict[str, object]:
    created = datetime.fromtimestamp(_created(card), UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
    }


def _model(card: Card, services: Services, name: str) -> dict[str, object]:
    settings = services.settings(card)
    limit = settings.max_context
    return {
        "id": name,
        "root": card.name,  # the model's own name, where the id is an alias
        "aliases": settings.alias,
        "object": "model",
        "created": _created(card),
        "owned_by": "penstock",
        "max_model_len": min(card.context, limit or card.context),
        # What the loaded model can hold; None while it is not loaded.
        "context_now": services.context_now(card.name),
        "kind": card.kind,
        **card.facts(),
    }


def _created(card: Card) -> int:
    try:
        return int(card.path.stat().st_mtime)
    except OSError:  # removed since the scan
        return 0
