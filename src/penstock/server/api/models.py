"""`/v1/models`: which models a request may name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.catalog import Card
    from penstock.server.api.exchange import Exchange
    from penstock.server.api.services import Services


async def list_models(exchange: Exchange, services: Services) -> None:
    """All models on disk, each under every name it has."""
    cards = await asyncio.to_thread(services.catalog.scan)
    models = [
        _model(card, services, name)
        for card in services.reachable(cards)
        for name in (card.name, *services.settings(card).alias)
    ]
    await exchange.send_json({"object": "list", "data": models})


async def show_model(exchange: Exchange, services: Services) -> None:
    """One of them."""
    name = exchange.path_params["id"]
    await exchange.send_json(_model(await services.find(name), services, name))


def _model(card: Card, services: Services, name: str) -> dict[str, object]:
    settings = services.settings(card)
    limit = settings.max_context
    try:
        created = int(card.path.stat().st_mtime)
    except OSError:  # removed since the scan
        created = 0
    return {
        "id": name,
        "root": card.name,  # the model's own name, where the id is an alias
        "aliases": settings.alias,
        "object": "model",
        "created": created,
        "owned_by": "penstock",
        "max_model_len": min(card.context, limit or card.context),
        # What the loaded model can hold; None while it is not loaded.
        "context_now": services.context_now(card.name),
        "kind": card.kind,
    }
