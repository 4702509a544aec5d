"""Which models give up memory for others: a pure choice among loaded models.

Unused KV comes first, then idle models, then busy ones that are drained. Knows what models hold and
when they were last used; what is done with the choice is the caller's affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.memory.domains import Domain


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """A loaded model as a candidate to give something up."""

    name: str
    domain: Domain
    fixed_bytes: int
    kv_bytes: int
    kv_used_bytes: int  # by requests, as last reported
    kv_min_bytes: int
    idle: bool  # nobody leases it and nothing runs on it
    pinned: bool
    used_at: float
    served: bool = True  # for as long as its load took, at least

    @property
    def total_bytes(self) -> int:
        """What its unload gives back."""
        return self.fixed_bytes + self.kv_bytes


def pinned_bytes(usages: Iterable[ModelUsage], domain: Domain, besides: str) -> int:
    """What other models keep even when asked for all they can spare."""
    return sum(
        usage.fixed_bytes + usage.kv_min_bytes
        for usage in usages
        if usage.pinned and usage.domain == domain and usage.name != besides
    )


def choose_shed(
    usages: Iterable[ModelUsage], wanted_bytes: int, keep_bytes: int
) -> tuple[tuple[str, int], ...]:
    """Who gives back how much unused KV: idle ones first, the longest unused first of these."""
    chosen: list[tuple[str, int]] = []
    for usage in sorted(usages, key=lambda r: (not r.idle, r.used_at)):
        if wanted_bytes <= 0:
            break
        keep = max(usage.kv_used_bytes, usage.kv_min_bytes, keep_bytes)
        give = min(usage.kv_bytes - keep, wanted_bytes)
        if give > 0:
            chosen.append((usage.name, give))
            wanted_bytes -= give
    return tuple(chosen)


def choose_victims(
    usages: Iterable[ModelUsage], domain: Domain, wanted_bytes: int
) -> tuple[str, ...]:
    """Idle, unpinned models to unload, the longest unused first; all or none that suffice."""
    chosen: list[str] = []
    idle = [r for r in usages if r.idle and not r.pinned and r.domain == domain]
    for usage in sorted(idle, key=lambda r: r.used_at):
        if wanted_bytes <= 0:
            break
        chosen.append(usage.name)
        wanted_bytes -= usage.total_bytes
    return tuple(chosen) if wanted_bytes <= 0 else ()


def choose_drained(
    usages: Iterable[ModelUsage], domain: Domain, wanted_bytes: int
) -> tuple[str, ...]:
    """Busy, unpinned models whose end is to be waited for, beside the idle ones that go with them;
    the longest unused first, all or none that suffice.

    One that was itself loaded a moment ago serves for as long as its load took: so two models that
    are both wanted all the time take turns, and most of the time is not spent on loading.
    """
    chosen: list[str] = []
    unpinned = [r for r in usages if not r.pinned and r.domain == domain]
    for usage in sorted(unpinned, key=lambda r: (not r.idle, r.used_at)):
        if wanted_bytes <= 0:
            break
        if usage.idle or usage.served:
            wanted_bytes -= usage.total_bytes
            if not usage.idle:
                chosen.append(usage.name)
    return tuple(chosen) if wanted_bytes <= 0 else ()
