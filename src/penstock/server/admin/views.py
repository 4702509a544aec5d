"""JSON objects of the admin API: the ledger, the readings and the models at one moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.memory.governor import memory_rows
from penstock.server.observe.readings import own_bytes

if TYPE_CHECKING:
    from penstock.catalog import Card
    from penstock.config import ModelsSettings
    from penstock.server.observe.timeline import Figures
    from penstock.server.protocols.services import Services

_MAX_ROWS = 200  # requests in one row of the stream


def memory_view(services: Services) -> dict[str, object]:
    """Who holds what, beside what was last read; the sums are of one snapshot."""
    snapshot, readings = services.ledger.snapshot(), services.governor.readings
    rows = memory_rows(snapshot, readings)
    read = own_bytes(readings)
    domains = rows["domains"]
    assert isinstance(domains, dict)
    for name, state in domains.items():
        state["read_bytes"] = read.get(str(name))
    rows["requests"] = {
        "used_bytes": services.requests.used_bytes,
        "waiting": services.requests.waiting,
        "for_tokenizer": services.texts.waiting,
    }
    connections = services.connections
    rows["connections"] = {
        "open": len(connections),
        "most": connections.max_connections,
        "held_bytes": connections.held_bytes,
        "refused": connections.refused,
        "gave_way": connections.gave_way,
    }
    rows["drift_reserve"] = {
        name: model.grant.drift_reserve_bytes
        for name, model in services.residency.loaded_models().items()
        if model.grant is not None and model.grant.drift_reserve_bytes
    }
    return rows


def domain_figures(services: Services) -> dict[str, Figures]:
    """Each domain in a few numbers, for the timeline."""
    read = own_bytes(services.governor.readings)
    return {
        str(name): {
            "limit_bytes": state.limit_bytes,
            "capacity_bytes": state.capacity_bytes,
            "booked_bytes": state.booked_bytes,
            "read_bytes": read.get(str(name)),
            "external_bytes": state.external_bytes,
            "free_bytes": max(state.free_bytes, 0),
            "short": state.short,
        }
        for name, state in services.ledger.snapshot().items()
    }


def model_rows(services: Services) -> list[dict[str, object]]:
    """The models in memory, and those on their way."""
    return [with_settings(row, services) for row in services.residency.snapshot()]


def with_settings(row: dict[str, object], services: Services) -> dict[str, object]:
    """A model's row with what its settings and its worker say."""
    name = str(row["name"])
    settings = services.config.models.settings(name)
    model = services.residency.loaded_models().get(name)
    ttl_s = settings.ttl or None if model is None else model.ttl_s(settings)
    row = row | {"aliases": settings.alias, "ttl_s": ttl_s}
    if model is not None:
        status = model.client.status
        reused, prompts = (0, 0) if status is None else (status.reused_tokens, status.prompt_tokens)
        row |= {
            "tokens_per_s": services.records.rates.of(name),
            "kv_used_bytes": (
                0 if status is None else status.kv_capacity_bytes - status.kv_free_bytes
            ),
            "running": 0 if status is None else status.running,
            "waiting": 0 if status is None else status.waiting,
            "cached_share": round(reused / max(prompts, 1), 4),
            "drafts": {
                proposer: {"verified": verified, "accepted": accepted}
                for proposer, (verified, accepted) in (status.drafts if status else {}).items()
                if verified
            },
        }
    return row


def request_rows(services: Services) -> list[dict[str, object]]:
    """The requests in hand: those that wait first, in their order, then the others as they came."""
    places: dict[object, tuple[int, float]] = {}
    for queue in services.queues.values():
        places.update(queue.places().items())
    waiting: list[tuple[int, dict[str, object]]] = []
    others: list[dict[str, object]] = []
    for request in services.live:
        row = request.row()
        if (found := places.get(request.queued)) is None:
            others.append(row)
        else:
            place, expected_start_s = found
            waiting.append((place, row | {"place": place, "expected_start_s": expected_start_s}))
    waiting.sort(key=lambda placed: placed[0])
    return [row for _, row in waiting] + others


def stream_states(services: Services) -> dict[str, dict[str, object]]:
    """The states that the stream tells, by kind."""
    requests = request_rows(services)
    return {
        "memory": memory_view(services),
        "models": {"models": model_rows(services)},
        "requests": {
            "total": len(requests),
            "waiting": sum(row["place"] is not None for row in requests),
            "requests": requests[:_MAX_ROWS],
        },
        "tasks": {"tasks": services.records.tasks.rows()},
    }


def card_row(card: Card, models: ModelsSettings) -> dict[str, Any]:
    """A model on disk, as `penstock list --json` shows it."""
    return {
        "name": card.name,
        "path": str(card.path),
        "kind": card.kind,
        **card.facts(),
        "architecture": card.architecture,
        "parameters": card.parameters,
        "bytes": card.bytes_in_memory(),
        "context": card.context,
        "dtype": card.dtype,
        "kv_dtype": models.settings(card.name).kv_dtype,
        "formats": list(card.formats),
        "stored_bytes": card.weight_bytes,
        "source": card.source,
        "aliases": models.settings(card.name).alias,
    }
