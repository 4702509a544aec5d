"""What operators ask: is it alive, can it take a request, what are the figures and settings."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock import __version__
from penstock.errors import Overloaded, WorkerLost
from penstock.memory.governor import memory_rows
from penstock.server.metrics import MEDIA_TYPE
from penstock.server.reconfigure import reread

if TYPE_CHECKING:
    from penstock.server.api.exchange import Exchange
    from penstock.server.api.services import Services
    from penstock.server.client import ModelClient

# A probe waits for the step in hand, which may be a long one.
_PROBE_S = 10.0

_FRONT_PAGE = f"""Penstock {__version__} serves language models behind the usual APIs.

  /v1/models             the models that can be asked
  /v1/chat/completions   a conversation
  /v1/completions        a text to be continued
  /v1/responses          an answer as items, stored
  /v1/messages           a conversation, as Anthropic has it
  /api/chat              a conversation, as Ollama has it
  /openapi.json          all of this for programs
  /v1/plan               what a request would need, without running it
  /admin/api/models      the models in memory; also memory, requests, events, plan
  /health  /ready  /metrics
"""


async def front_page(exchange: Exchange, services: Services) -> None:
    """What this server is, for a person with a browser."""
    await exchange.send_bytes(_FRONT_PAGE.encode(), "text/plain; charset=utf-8")


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
    rows = memory_rows(services.ledger.snapshot(), services.governor.readings)
    rows["requests"] = {
        "used_bytes": services.requests.used_bytes,
        "waiting": services.requests.waiting,
    }
    rows["slack"] = {
        name: model.holding.slack_bytes
        for name, model in services.residency.tenants().items()
        if model.holding is not None and model.holding.slack_bytes
    }
    await exchange.send_json(rows)


async def reset_memory(exchange: Exchange, services: Services) -> None:
    """Forget by how much processes have surprised us; the next reading gives the bytes back."""
    for model in services.residency.tenants().values():
        if model.holding is not None:
            model.holding.forget_surprises()
    services.governor.events.add("slack reset")
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


async def waiting_requests(exchange: Exchange, services: Services) -> None:
    """Everyone in line, by model, with place and expected start."""
    await exchange.send_json([row for lane in services.lanes.values() for row in lane.rows()])
