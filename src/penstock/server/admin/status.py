"""`/health`, `/ready`, `/metrics`, and the admin routes for memory, events and reload."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.errors import Overloaded, WorkerLost
from penstock.server.admin.reconfigure import reread
from penstock.server.admin.views import memory_view
from penstock.server.metrics import MEDIA_TYPE

if TYPE_CHECKING:
    from penstock.server.http.exchange import Exchange
    from penstock.server.processes.worker_client import ModelClient
    from penstock.server.protocols.services import Services

# A probe waits for the step in hand, which may be a long one.
_PROBE_S = 10.0


async def health(exchange: Exchange, services: Services) -> None:
    """The event loop turns."""
    await exchange.send_json({"status": "ok"})


async def ready(exchange: Exchange, services: Services) -> None:
    """Every resident model runs a real step now, and the default one is not on its way. If that was
    unloaded, the next request loads it, which is no reason to send none."""
    rows = {str(row["name"]): row for row in services.residency.snapshot()}
    models = services.config.models
    default = None if models.default is None else models.canonical(models.default)
    row = None if default is None else rows.get(default)
    if row is not None and row["state"] in ("loading", "failed"):
        raise Overloaded(f"The model {default!r} is {row['state']}.", retry_after_s=5)
    clients = services.residency.ready_clients()
    answers = await asyncio.gather(*(_probe(client) for client in clients.values()))
    if failed := [name for name, alive in zip(clients, answers, strict=True) if not alive]:
        raise Overloaded(
            f"No step was done within {_PROBE_S:.0f} s by: {', '.join(failed)}.", retry_after_s=5
        )
    await exchange.send_json({"status": "ready", "models": sorted(clients)})


async def _probe(client: ModelClient) -> bool:
    try:
        await client.probe(_PROBE_S)
    except (TimeoutError, WorkerLost):
        return False
    return True


async def metrics(exchange: Exchange, services: Services) -> None:
    """Prometheus' text."""
    await exchange.send_bytes(services.metrics.render(), MEDIA_TYPE)


async def memory(exchange: Exchange, services: Services) -> None:
    """Who holds what, beside what was last read."""
    await exchange.send_json(memory_view(services))


async def reset_memory(exchange: Exchange, services: Services) -> None:
    """Forget by how much processes were over their books; the next reading gives the bytes back."""
    for model in services.residency.loaded_models().values():
        if model.grant is not None:
            model.grant.reset_drift_reserve()
    services.governor.events.add("drift reserve reset")
    await exchange.send_json({"status": "ok"})


async def reread_settings(exchange: Exchange, services: Services) -> None:
    """Read `penstock.toml` again; says what of it holds now, and what does not yet."""
    changes = await reread(services)
    await exchange.send_json(
        {"applied": changes.applied, "reload": changes.reload, "restart": changes.restart}
    )


async def events(exchange: Exchange, services: Services) -> None:
    """What the governor did and noticed of late."""
    await exchange.send_json(services.governor.events.rows())
