"""Bytes that models report as in use, by domain and purpose.

The kernel and the driver report bytes per process, not per purpose. Each model reports its weights,
its KV, the peak of its steps, and KV in RAM or on its way to disk. What no model reports (the bare
process, CUDA graphs) is missing here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.memory.domains import RAM
from penstock.memory.ledger import Purpose

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.memory.ledger import Key
    from penstock.server.residency.model import Model


def held_by_purpose(models: Iterable[Model], requests_bytes: int) -> dict[Key, int]:
    """Of loaded models, and what requests hold."""
    held: dict[Key, int] = {(RAM, Purpose.REQUESTS): requests_bytes}

    def add(key: Key, size: float) -> None:
        held[key] = held.get(key, 0) + int(size)

    for model in models:
        if model.grant is None:
            continue
        domain = model.grant.domain
        add((domain, Purpose.WEIGHTS), model.client.ready.weight_bytes)
        if (status := model.client.status) is None:
            continue
        add((domain, Purpose.KV), status.kv_committed_bytes)
        add((domain, Purpose.STEP), status.measured_bytes)
        if not domain.is_ram:
            add((RAM, Purpose.TIER), status.tier.get("ram_held_bytes", 0))
        add((RAM, Purpose.QUEUE), status.tier.get("queued_bytes", 0))
    return {key: size for key, size in held.items() if size or key[1] is Purpose.REQUESTS}
