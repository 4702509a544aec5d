"""Making room: the effects of what `memory.admission` decides for loads and growing models.

A load waits here, in order of arrival within its domain, while idle models shrink or go. What to
ask of whom is decided by pure functions; this only asks, waits and books. Knows no
processes: an `Evictable` is a loaded model that can give memory back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

from penstock.errors import Overloaded, PenstockError
from penstock.memory.admission import Accept, Refuse, Wait, decide_growth, decide_load, owner_of
from penstock.memory.domains import RAM
from penstock.memory.eviction import choose_shed
from penstock.memory.ledger import OutOfBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.memory.admission import LoadNeed, ModelCapacity
    from penstock.memory.domains import Domain
    from penstock.memory.eviction import ModelUsage
    from penstock.memory.ledger import Ledger, Needs, Reservation

log = logging.getLogger(__name__)

# Something may change without a word to us (an idle model is left, a reading falls): look again.
_LOOK_AGAIN_S = 0.5
# KV is not handed out in crumbs, nor right after a domain was short.
SPREAD_MIN_BYTES = 16 << 20
_BUSY_SHARE = 32  # of the limit


class Evictable(Protocol):
    """A loaded model, as far as its memory goes."""

    def usage(self) -> ModelUsage:
        """What it holds and could give."""

    @property
    def kv_max_bytes(self) -> int:
        """More KV than this is of no use to it."""

    def grow_kv(self, kv_bytes: int) -> None:
        """Book and grant so much KV, more than now; `OutOfBudget` if it does not fit."""

    async def shrink_kv(self, kv_bytes: int) -> None:
        """Have it hold no more than so much KV; returns when it has answered, or is gone."""

    def hold_new_leases(self, on: bool) -> None:
        """Give no new lease, so that it comes to rest; or give them again."""

    async def unload(self) -> None:
        """End it, if it is still idle; returns when its bytes are back."""


class MemoryArbiter:
    """Who gets free memory, and what is done to make some."""

    def __init__(
        self, ledger: Ledger, evictables: Callable[[], Mapping[str, Evictable]], patience_s: float
    ) -> None:
        self._ledger = ledger
        self._evictables = evictables
        self._patience_s = patience_s
        self._lines: defaultdict[Domain, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._waiting: defaultdict[Domain, int] = defaultdict(int)
        self._changed = asyncio.Event()
        self.held: set[Domain] = set()  # domains in which the governor lets nobody grow
        self.claimed: Callable[[], bool] = lambda: False  # requests wait for memory in `ram`

    def usages(self) -> list[ModelUsage]:
        """Every loaded model, for the pure functions."""
        return [evictable.usage() for evictable in self._evictables().values()]

    def wake(self) -> None:
        """Something changed that a waiter may want to see."""
        self._changed.set()

    async def take(self, need: LoadNeed) -> Reservation:
        """Book a load, when its turn comes and room is made; raises why it cannot be had."""
        first = decide_load(need, self._ledger.snapshot(), self.usages())
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
                verdict = decide_load(need, self._ledger.snapshot(), self.usages(), spent)
                match verdict:
                    case Accept(kv_bytes):
                        return self._ledger.reserve(owner_of(need.name), need.needs(kv_bytes))
                    case Refuse(error):
                        raise error
                    case Wait():
                        if not verdict.shed:
                            # The models to be drained rest too. Otherwise a request that waited for
                            # one of them loads it again before it is unloaded, again and again.
                            self._rest(need.domain, verdict.drain + verdict.unload)
                        await self._act(verdict, spent)
        finally:
            self._rest(need.domain, ())

    def _rest(self, domain: Domain, names: tuple[str, ...]) -> None:
        """These models of a domain, and no others of it, take no more requests."""
        for name, evictable in self._evictables().items():
            if evictable.usage().domain == domain:
                evictable.hold_new_leases(name in names)

    async def grow(
        self, capacity: Callable[[], ModelCapacity | None], name: str, kv_bytes: int
    ) -> None:
        """Give a loaded model so much KV if idle others can spare it now."""
        spent: set[str] = set()
        while (now := capacity()) is not None and (now.kv_now_bytes or 0) < kv_bytes:
            snapshot, usages = self._ledger.snapshot(), self.usages()
            verdict = decide_growth(snapshot, now, kv_bytes, usages, spent)
            if isinstance(verdict, Accept):
                if (evictable := self._evictables().get(name)) is not None:
                    evictable.grow_kv(kv_bytes)
                return
            if not (verdict.shed or verdict.unload):
                return
            await self._act(verdict, spent)

    async def book(self, booking: Reservation, needs: Needs) -> None:
        """Resize a booking of RAM, at the cost of KV that nobody uses; waits for as long as that
        is not enough."""
        more = sum(needs.values()) - booking.total()
        while True:
            with contextlib.suppress(OutOfBudget):
                return booking.resize(needs)
            await self.reclaim(RAM, more)
            with contextlib.suppress(OutOfBudget):
                return booking.resize(needs)
            await self.wait()

    async def reclaim(self, domain: Domain, size: int) -> None:
        """Ask for unused KV, so that `size` more can be booked; for requests that wait."""
        shed = choose_shed(
            [r for r in self.usages() if r.domain == domain],
            size - self._ledger.free(domain),
            keep_bytes=0,
        )
        if shed:
            await self._act(Wait(shed=shed), set())

    async def _act(self, verdict: Wait, spent: set[str]) -> None:
        """Do what makes room, or wait until something changes."""
        evictables = self._evictables()
        acts = []
        for name, size in verdict.shed:
            spent.add(name)
            if (evictable := evictables.get(name)) is not None:
                acts.append(evictable.shrink_kv(evictable.usage().kv_bytes - size))
        acts += [evictables[name].unload() for name in verdict.unload if name in evictables]
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
        for evictable in sorted(self._evictables().values(), key=lambda t: -t.usage().used_at):
            usage = evictable.usage()
            domain = usage.domain
            if self._waiting[domain] or domain in self.held or (domain == RAM and self.claimed()):
                continue
            more = min(self._ledger.free(domain), evictable.kv_max_bytes - usage.kv_bytes)
            limit = self._ledger.snapshot()[domain].limit_bytes
            least = max(SPREAD_MIN_BYTES, limit // _BUSY_SHARE if busy else 0)
            if more < least:
                continue
            try:
                evictable.grow_kv(usage.kv_bytes + more)
            except OutOfBudget:
                continue
