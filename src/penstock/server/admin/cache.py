"""`/admin/api/cache` and `/admin/api/catalog`: what is on disk, KV and models."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from penstock.errors import StoreUnavailable
from penstock.server.admin.views import card_row
from penstock.tiers import Quota, Store

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.server.http.exchange import Exchange
    from penstock.server.protocols.services import Services
    from penstock.tiers.store import Summary


def open_store(config: Config) -> Store:
    """The cache directory."""
    return Store(config.cache.dir, Quota.parse(config.cache.size))


async def stats(exchange: Exchange, services: Services) -> None:
    """KV on disk by model, and what loaded models found in all tiers."""
    view = await asyncio.to_thread(_summary, services.config)
    statuses = {name: client.status for name, client in services.residency.ready_clients().items()}
    view["loaded"] = {
        name: {
            "prompt_tokens": status.prompt_tokens,
            "reused_tokens": status.reused_tokens,
            "evictions": status.evictions,
            "tier": status.tier,
        }
        for name, status in statuses.items()
        if status is not None
    }
    await exchange.send_json(view)


def _summary(config: Config) -> dict[str, object]:
    try:
        store = open_store(config)
        return summary_view(store, store.summary())
    except OSError as error:
        raise StoreUnavailable(
            f"The cache directory {config.cache.dir} cannot be read: {error.strerror or error} "
            "(cache.dir)."
        ) from None


def summary_view(store: Store, found: Summary) -> dict[str, object]:
    """What is in the cache directory; the model used last comes first."""
    by_use = sorted(found.models.items(), key=lambda item: -item[1].used_ns)
    return {
        "dir": str(store.directory),
        "held_bytes": found.held_bytes,
        "quota_bytes": found.quota_bytes,
        "free_bytes": found.free_bytes,
        "other_files": found.other_files,
        "other_bytes": found.other_bytes,
        "models": [
            {
                "model": use.label or None,
                "id": model,
                "files": use.files,
                "bytes": use.bytes,
                "last_used": when(use.used_ns),
            }
            for model, use in by_use
        ],
    }


def when(used_ns: int) -> str:
    """A time, for people."""
    return datetime.fromtimestamp(used_ns // 10**9, UTC).isoformat()


async def catalog(exchange: Exchange, services: Services) -> None:
    """The models on disk, and why some folders cannot be used."""
    cards = await asyncio.to_thread(services.catalog.scan)
    models = services.config.models
    await exchange.send_json(
        {
            "models": [card_row(card, models) for card in cards.values()],
            "problems": services.catalog.problems | models.hidden(cards),
        }
    )
