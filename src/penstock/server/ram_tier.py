"""What a model on a GPU keeps of its KV in RAM, as a tenant there: all of it can be spared.

So whoever needs RAM (a load, a request, the governor) gets it from here first, by the same rules by
which models give KV, and what is free goes here in the end.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.memory.admission import Resident

if TYPE_CHECKING:
    from penstock.server.holding import Holding


@dataclass(frozen=True, slots=True)
class RamTier:
    """A tenant of `Room` that is never in use, and first to give."""

    model: str
    holding: Holding
    kv_most_bytes: int  # its share of what all tiers may have

    @property
    def name(self) -> str:
        """No model has such a name."""
        return f"{self.model} (KV in RAM)"

    def resident(self) -> Resident:
        """Pinned, since there is nothing to unload."""
        return Resident(
            name=self.name,
            domain="ram",
            fixed_bytes=0,
            kv_bytes=self.holding.tier_bytes,
            kv_used_bytes=0,
            kv_least_bytes=0,
            idle=True,
            pinned=True,
            used_at=float("-inf"),
        )

    def grow_kv(self, kv_bytes: int) -> None:
        """Book and grant so much; `OutOfBudget` if it does not fit."""
        self.holding.grow_tier(kv_bytes)

    async def shrink_kv(self, kv_bytes: int) -> None:
        """Have it hold no more than so much."""
        await asyncio.shield(self.holding.shrink_tier(kv_bytes))

    def make_way(self) -> None:
        """Come down to the share, in its own time."""
        if self.holding.tier_bytes > self.kv_most_bytes:
            self.holding.shrink_tier(self.kv_most_bytes)

    def stand_back(self, on: bool) -> None:
        """It takes no requests."""

    async def unload(self) -> None:
        """It goes with its model."""
