"""Making room: the effects of what `memory.admission` decides for loads and growing models.

A load waits here, in order of arrival within its domain, while idle models shrink or go. What to
ask of whom is decided by pure functions; this only asks, waits and books. Knows tenants, not
processes: a `Tenant` is a loaded model that can give memory back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

from penstock.errors import Overloaded, PenstockError
from penstock.memory.admission import (
    Accept,
    Refuse,
    Wait,
    choose_shed,
    decide_growth,
    decide_load,
    owner_of,
)
from penstock.memory.ledger import OutOfBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.memory.admission import LoadNeed, ModelRoom, Resident
    from penstock.memory.ledger import Ledger, Reservation

log = logging.getLogger(__name__)

# Something may change without a word to us (an idle model is left, a reading falls): look again.
_LOOK_AGAIN_S = 0.5
# KV is not handed out in crumbs, nor right after a domain was short.
SPREAD_LEAST_BYTES = 16 << 20
_BUSY_SHARE = 32  # of the limit


class Tenant(Protocol):
    """A loaded model, as far as its memory goes."""

    def resident(self) -> Resident:
        """What it holds and could give."""

    @property
    def kv_most_bytes(self) -> int:
        """More KV than this is of no use to it."""

    def grow_kv(self, kv_bytes: int) -> None:
        """Book and grant so much KV, more than now; `OutOfBudget` if it does not fit."""

    async def shrink_kv(self, kv_bytes: int) -> None:
        """Have it hold no more than so much KV; returns when it has answered, or is gone."""

    def stand_back(self, on: bool) -> None:
        """Give no new lease, so that it comes to rest; or give them again."""

    async def unload(self) -> None:
        """End it, if it is still idle; returns when its bytes are back."""


class Room:
    """Who gets free memory, and what is done to make some."""

    def __init__(
        self, ledger: Ledger, tenants: Callable[[], Mapping[str, Tenant]], patience_s: float
    ) -> None:
        self._ledger = ledger
        self._tenants = tenants
        self._patience_s = patience_s
        self._lines: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._waiting: defaultdict[str, int] = defaultdict(int)
        self._changed = asyncio.Event()
        self.held: set[str] = set()  # domains in which the governor lets nobody grow
        self.claimed: Callable[[], bool] = lambda: False  # requests wait for memory in `ram`

    def residents(self) -> list[Resident]:
        """Every loaded model, for the pure functions."""
        return [tenant.resident() for tenant in self._tenants().values()]

    def wake(self) -> None:
        """Something changed that a waiter may want to see."""
        self._changed.set()

    async def take(self, need: LoadNeed) -> Reservation:
        """Book a load, when its turn comes and room is made; raises why it cannot be had."""
        first = decide_load(need, self._ledger.snapshot(), self.residents())
        if isinstance(first, Refuse):  # no need to stand in line for that
            raise first.error
        domains = {domain for domain, _ in need.fixed} | {need.domain}
        for domain in domains:
            self._waiting[domain] += 1
        try:
            async with asyncio.timeout(self._patience_s), self._lines[need.domain]:
                return await self._take_in_turn(need)
        except TimeoutError:
            raise Overloaded(
                f"The model {need.name!r} waited {self._patience_s:.0f} s for memory that other "
                "models are using (server.queue_deadline_s).",
                retry_after_s=30,
            ) from None
        finally:
            for domain in domains:
                self._waiting[domain] -= 1

    async def _take_in_turn(self, need: LoadNeed) -> Reservation:
        spent: set[str] = set()
        try:
            while True:
                verdict = decide_load(need, self._ledger.snapshot(), self.residents(), spent)
                match verdict:
                    case Accept(kv_bytes):
                        return self._ledger.reserve(owner_of(need.name), need.needs(kv_bytes))
                    case Refuse(error):
                        raise error
                    case Wait():
                        if not verdict.shed:
                            # Those that go, too: a request that has waited for one of them would
                            # otherwise be quicker than its end, again and again.
                            self._rest(need.domain, verdict.drain + verdict.unload)
                        await self._act(verdict, spent)
        finally:
            self._rest(need.domain, ())

    def _rest(self, domain: str, names: tuple[str, ...]) -> None:
        """These models of a domain, and no others of it, take no more requests."""
        for name, tenant in self._tenants().items():
            if tenant.resident().domain == domain:
                tenant.stand_back(name in names)

    async def grow(self, room: Callable[[], ModelRoom | None], name: str, kv_bytes: int) -> None:
        """Give a loaded model so much KV if idle others can spare it now."""
        spent: set[str] = set()
        while (now := room()) is not None and (now.kv_now_bytes or 0) < kv_bytes:
            snapshot, residents = self._ledger.snapshot(), self.residents()
            verdict = decide_growth(snapshot, now, kv_bytes, residents, spent)
            if isinstance(verdict, Accept):
                if (tenant := self._tenants().get(name)) is not None:
                    tenant.grow_kv(kv_bytes)
                return
            if not (verdict.shed or verdict.unload):
                return
            await self._act(verdict, spent)

    async def reclaim(self, domain: str, size: int) -> None:
        """Ask for unused KV, so that `size` more can be booked; for requests that wait."""
        shed = choose_shed(
            [r for r in self.residents() if r.domain == domain],
            size - self._ledger.free(domain),
            keep_bytes=0,
        )
        if shed:
            await self._act(Wait(shed=shed), set())

    async def _act(self, verdict: Wait, spent: set[str]) -> None:
        """Do what makes room, or wait until something changes."""
        tenants = self._tenants()
        acts = []
        for name, size in verdict.shed:
            spent.add(name)
            if (tenant := tenants.get(name)) is not None:
                acts.append(tenant.shrink_kv(tenant.resident().kv_bytes - size))
        acts += [tenants[name].unload() for name in verdict.unload if name in tenants]
        if acts:
            for outcome in await asyncio.gather(*acts, return_exceptions=True):
                if isinstance(outcome, PenstockError):
                    log.warning("no room could be made: %s", outcome.message)
                elif isinstance(outcome, BaseException):
                    raise outcome
            return
        spent.clear()  # by then they may have more to give
        await self.wait()

    async def wait(self) -> None:
        """Until something changes, or it is time to look again anyway."""
        self._changed.clear()
        try:
            async with asyncio.timeout(_LOOK_AGAIN_S):
                await self._changed.wait()
        except TimeoutError:
            return

    def spread(self, *, busy: bool = False) -> None:
        """Hand free memory to models that can use it, the latest used first; never while loads wait
        or a domain is held. While requests come and go, only if there is plenty: what they take and
        give back should not travel through a model each time."""
        for tenant in sorted(self._tenants().values(), key=lambda t: -t.resident().used_at):
            resident = tenant.resident()
            domain = resident.domain
            if self._waiting[domain] or domain in self.held or (domain == "ram" and self.claimed()):
                continue
            more = min(self._ledger.free(domain), tenant.kv_most_bytes - resident.kv_bytes)
            limit = self._ledger.snapshot()[domain].limit_bytes
            least = max(SPREAD_LEAST_BYTES, limit // _BUSY_SHARE if busy else 0)
            if more < least:
                continue
            try:
                tenant.grow_kv(resident.kv_bytes + more)
            except OutOfBudget:
                continue
