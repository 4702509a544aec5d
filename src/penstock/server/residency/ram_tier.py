"""What a model on a GPU keeps of its KV in RAM: an `Evictable` there, all of it can be spared.

So whoever needs RAM (a load, a request, the governor) gets it from here first, by the same rules by
which models give KV, and what is free goes here in the end.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.memory.domains import RAM
from penstock.memory.eviction import ModelUsage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.server.residency.memory_grant import MemoryGrant
    from penstock.server.residency.model import Model


@dataclass(frozen=True, slots=True)
class RamTier:
    """An `Evictable` that is never in use, and first to give."""

    model: str
    grant: MemoryGrant
    kv_max_bytes: int  # its share of what all tiers may have

    @property
    def name(self) -> str:
        """No model has such a name."""
        return f"{self.model} (KV in RAM)"

    def usage(self) -> ModelUsage:
        """Pinned, since there is nothing to unload."""
        return ModelUsage(
            name=self.name,
            domain=RAM,
            fixed_bytes=0,
            kv_bytes=self.grant.tier_bytes,
            kv_used_bytes=0,
            kv_min_bytes=0,
            idle=True,
            pinned=True,
            used_at=float("-inf"),
        )

    def grow_kv(self, kv_bytes: int) -> None:
        """Book and grant so much; `OutOfBudget` if it does not fit."""
        self.grant.grow_tier(kv_bytes)

    async def shrink_kv(self, kv_bytes: int) -> None:
        """Have it hold no more than so much."""
        await asyncio.shield(self.grant.shrink_tier(kv_bytes))

    def make_way(self) -> None:
        """Come down to the share, in its own time."""
        if self.grant.tier_bytes > self.kv_max_bytes:
            self.grant.shrink_tier(self.kv_max_bytes)

    def hold_new_leases(self, on: bool) -> None:
        """It takes no requests."""

    async def unload(self) -> None:
        """It goes with its model."""


def ram_tiers(models: Mapping[str, Model], total_bytes: int) -> list[RamTier]:
    """Those of the loaded models that compute elsewhere, each with an equal part of all RAM that
    such tiers may have."""
    grants = {name: model.grant for name, model in models.items() if model.grant is not None}
    elsewhere = {
        name: grant
        for name, grant in grants.items()
        if not grant.domain.is_ram and grant.plan.kv.groups
    }
    part = total_bytes // max(1, len(elsewhere))
    return [RamTier(name, grant, part) for name, grant in elsewhere.items()]
