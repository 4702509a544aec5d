"""`/v1/models`: which models a request may name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.catalog import Card
    from penstock.server.api.exchange import Exchange
    from penstock.server.api.services import Services


async def list_models(exchange: Exchange, services: Services) -> None:
    """All models on disk."""
    cards = await asyncio.to_thread(services.catalog.scan)
    content = {"object": "list", "data": [_model(card, services) for card in cards.values()]}
    await exchange.send_json(content)


async def show_model(exchange: Exchange, services: Services) -> None:
    """One of them."""
    card = await services.find(exchange.path_params["id"])
    await exchange.send_json(_model(card, services))


def _model(card: Card, services: Services) -> dict[str, object]:
    limit = services.config.models.settings(card.name).max_context
    try:
        created = int(card.path.stat().st_mtime)
    except OSError:  # removed since the scan
        created = 0
    return {
        "id": card.name,
        "object": "model",
        "created": created,
        "owned_by": "penstock",
        "max_model_len": min(card.context, limit or card.context),
        # What the loaded model can hold; None while it is not loaded.
        "context_now": services.context_now(card.name),
        "kind": card.kind,
    }
