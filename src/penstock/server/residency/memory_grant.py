"""What one worker holds: its booking, and the KV and step bytes it was granted.

The books rise before a grant is sent and fall only when the worker has answered that it holds no
more. Knows the worker's client and the books, not why memory moves.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.config import RELOAD_KEYS
from penstock.errors import ModelTooLarge, Overloaded
from penstock.memory.admission import ModelCapacity
from penstock.memory.domains import RAM
from penstock.memory.ledger import OutOfBudget, Purpose
from penstock.server.residency.drift_reserve import DriftReserve
from penstock.wire import Grant, Shed

if TYPE_CHECKING:
    from penstock.config import ModelSettings
    from penstock.memory.ledger import Ledger, Needs, Reservation
    from penstock.server.processes.worker_client import ModelClient
    from penstock.server.residency.load_estimate import LoadEstimate
    from penstock.wire import Freed, Ready

_WEIGHTS_IN_RAM = (RAM, Purpose.WEIGHTS)
_TIER = (RAM, Purpose.TIER)
_DRIFT_SHARE = 4  # of a model's bytes are kept for drift at most


class MemoryGrant:
    """The bytes of one worker, from its load to its end."""

    def __init__(self, ledger: Ledger, plan: LoadEstimate, booking: Reservation) -> None:
        self.plan = plan
        self.domain = plan.domain
        self.need = plan.load_need()
        self.kv_min_bytes = plan.kv_min_bytes  # what it keeps, whatever others need
        self._ledger = ledger
        self._booking = booking
        self._kv_key = (self.domain, Purpose.KV)
        self.granted_kv_bytes = booking.needs.get(self._kv_key, 0)
        self._step_bytes = booking.needs.get((self.domain, Purpose.STEP), 0)
        self._client: ModelClient | None = None
        self._latest: asyncio.Future[Freed | None] | None = None
        self.granted_tier_bytes = 0
        self._reserve = DriftReserve(booking.total() // _DRIFT_SHARE)
        self.drift_reserve_bytes = 0  # booked for drift
        self.unbooked_bytes = 0  # of drift, until KV has made room for it
        self._latest_excess = 0

    @property
    def kv_bytes(self) -> int:
        """KV as booked: what was granted, or more while the worker still gives back."""
        return self._booking.needs.get(self._kv_key, 0)

    @property
    def tier_bytes(self) -> int:
        """KV in RAM beside the device, as booked."""
        return self._booking.needs.get(_TIER, 0)

    @property
    def fixed_bytes(self) -> int:
        """Everything else in the domain it computes in."""
        return self._booking.total(self.domain) - self.kv_bytes

    @property
    def kv_max_bytes(self) -> int:
        """More KV than this is of no use to it; a load also asks for its largest step so."""
        return self.need.kv_max_bytes if self.plan.kv.groups else 0

    @property
    def total_bytes(self) -> int:
        """All of it, in every domain."""
        return self._booking.total()

    def book_measured(self, client: ModelClient) -> None:
        """The load is over: book what it measured instead of what it was thought to need.

        More than was thought comes out of the KV; if too little is left, the model does not fit.
        """
        ready = client.ready
        fixed = self._measured_needs(ready)
        if ready.step_bytes:
            self._step_bytes = ready.step_bytes
        kv_bytes = min(self._kv_room(ready, fixed), ready.kv_bytes, self.need.kv_max_bytes)
        try:
            self._booking.resize({**fixed, self._kv_key: kv_bytes})
        except OutOfBudget as error:  # in RAM, beside the device that it computes on
            held = sum(size for (domain, _), size in fixed.items() if domain == error.domain)
            limit = self._ledger.snapshot()[error.domain].limit_bytes
            kind = ModelTooLarge if held > limit else Overloaded
            raise kind(
                f"The model {self.plan.card.name!r} holds {held} bytes of {error.domain} beside "
                f"what it has on {self.domain}, as measured. {error.message} Raise memory.limit.",
                numbers=error.numbers,
            ) from None
        self._client = client
        self.granted_kv_bytes = kv_bytes
        if kv_bytes < ready.kv_bytes:
            self._grant()

    def _measured_needs(self, ready: Ready) -> Needs:
        """What a loaded worker needs beside its KV."""
        fixed = {key: size for key, size in self._booking.needs.items() if key != self._kv_key}
        fixed.pop((self.domain, Purpose.LOADING), None)
        fixed[self.domain, Purpose.WEIGHTS] = ready.weight_bytes
        if ready.overhead_bytes:
            own = ready.overhead_bytes - ready.queue_bytes + ready.kept_bytes
            fixed[RAM, Purpose.PROCESS] = own
        if ready.queue_bytes:
            fixed[RAM, Purpose.QUEUE] = ready.queue_bytes
        if ready.device_overhead_bytes:
            fixed[self.domain, Purpose.PROCESS] = ready.device_overhead_bytes
        if ready.graph_bytes:
            fixed[self.domain, Purpose.GRAPHS] = ready.graph_bytes
        if ready.step_bytes:
            fixed[self.domain, Purpose.STEP] = ready.step_bytes - ready.kept_bytes
        return fixed

    def _kv_room(self, ready: Ready, fixed: Needs) -> int:
        """What is left for KV; `ModelTooLarge` if that is less than it must have."""
        held = sum(size for (domain, _), size in fixed.items() if domain == self.domain)
        room = self._ledger.free(self.domain) + self._booking.total(self.domain) - held
        least = min(self.kv_min_bytes, ready.kv_bytes)
        if room < least:
            raise ModelTooLarge(
                f"The model {self.plan.card.name!r} holds {held} bytes of {self.domain} beside its "
                f"KV, as measured, which leaves {max(room, 0)} of the {least} that its smallest KV "
                "needs. Raise memory.limit, or lower step_tokens or step_sequences of the model.",
                numbers={
                    "reason": "memory",
                    "domain": str(self.domain),
                    "needed_bytes": held + least,
                    "limit_bytes": held + max(room, 0),
                },
            )
        return room

    def adopt(self, settings: ModelSettings) -> None:
        """These are the model's settings now; what it was loaded by stays as it is."""
        as_loaded = {key: getattr(self.plan.settings, key) for key in RELOAD_KEYS}
        self.plan = replace(self.plan, settings=replace(settings, **as_loaded))
        self.need, self.kv_min_bytes = self.plan.load_need(), self.plan.kv_min_bytes

    def grow(self, kv_bytes: int) -> None:
        """Book and grant so much KV; `OutOfBudget` if it does not fit."""
        assert self._client is not None
        kv_bytes -= kv_bytes % self._client.ready.kv_unit_bytes  # the rest is of no use to it
        if kv_bytes <= self.granted_kv_bytes:
            return
        self._book(max(kv_bytes, self.kv_bytes), self.tier_bytes)
        self.granted_kv_bytes = kv_bytes
        self._grant()

    async def shrink(self, kv_bytes: int) -> None:
        """Have the worker hold no more KV than this, or than its running requests need; the books
        fall when it has answered."""
        self.granted_kv_bytes = max(kv_bytes, 0)
        # Who waits may be called off; the books must hear the answer all the same.
        await asyncio.shield(self._grant())

    def grow_tier(self, tier_bytes: int) -> None:
        """Book and grant so much RAM for KV; `OutOfBudget` if it does not fit."""
        self._book(self.kv_bytes, max(tier_bytes, self.tier_bytes))
        self.granted_tier_bytes = tier_bytes
        self._grant()

    def shrink_tier(self, tier_bytes: int) -> asyncio.Future[Freed | None]:
        """Have the worker keep no more KV in RAM; the books fall when it has answered."""
        self.granted_tier_bytes = max(tier_bytes, 0)
        return self._grant()

    def trim(self) -> asyncio.Future[Freed | None]:
        """Have it give back what its allocators keep for later."""
        return self._order(Shed(0))

    def _grant(self) -> asyncio.Future[Freed | None]:
        return self._order(Grant(self.granted_kv_bytes, self._step_bytes, self.granted_tier_bytes))

    def _order(self, message: Grant | Shed) -> asyncio.Future[Freed | None]:
        assert self._client is not None
        answer = self._client.order(message)
        self._latest = answer
        answer.add_done_callback(self._answered)
        return answer

    def _answered(self, answer: asyncio.Future[Freed | None]) -> None:
        freed = None if answer.cancelled() else answer.result()
        # Only the answer to the latest order says what holds from now on.
        if freed is None or answer is not self._latest or not self.kv_bytes:
            return
        self.granted_kv_bytes = min(freed.kv_bytes, self.kv_bytes)
        self.granted_tier_bytes = min(freed.tier_bytes, self.tier_bytes)
        self._book(self.granted_kv_bytes, self.granted_tier_bytes)

    def measured(self, dirty_bytes: int) -> int:
        """Take a reading of the process's private RAM, mapped files excluded; returns the bytes
        above what was expected, which are booked as a reserve of the process.
        """
        if self._client is None:
            return 0
        ram, before = self._booking.needs, self.drift_reserve_bytes
        mapped = ram.get(_WEIGHTS_IN_RAM, 0) - self._client.ready.copied_bytes
        expected = self._booking.total(RAM) - before - mapped - self._uncommitted_bytes()
        # A reading and the worker's own word on its KV may be a moment apart; two in a row are not.
        latest, self._latest_excess = self._latest_excess, dirty_bytes - expected
        excess = min(latest, self._latest_excess)
        self._reserve.observe(excess)
        if (change := self._reserve.bytes - before) != 0:
            key = (RAM, Purpose.PROCESS)
            try:
                self._booking.resize({**ram, key: ram.get(key, 0) + change})
            except OutOfBudget:
                self.unbooked_bytes = change
            else:
                self.drift_reserve_bytes, self.unbooked_bytes = self._reserve.bytes, 0
        return excess

    def _uncommitted_bytes(self) -> int:
        """KV in RAM that is booked and certainly not in use: known while the worker rests."""
        client = self._client
        if not self.domain.is_ram:
            return 0  # what a GPU model keeps in RAM grows by itself, also while it rests
        if client is None or client.status is None or client.open_requests:
            return 0
        return max(self.kv_bytes - client.status.kv_committed_bytes, 0)

    def reset_drift_reserve(self) -> None:
        """Give back what is kept for a process that was once larger than expected."""
        self._reserve.reset()

    def mark_exiting(self) -> None:
        """The process was told to end; its bytes are out of use but not back."""
        self._booking.mark_exiting()

    def release(self) -> None:
        """The process is gone, and with it every byte."""
        self._booking.release()

    def capacity(self) -> ModelCapacity:
        """The loaded model as admission sees it."""
        plan = self.plan
        if self._client is None:
            return plan.capacity()
        ready = self._client.ready
        # Below what the KV holds, the context is the window that the worker found.
        # Where nothing is kept, it is what the largest step holds.
        bounded = ready.context < ready.kv_tokens or not ready.cost.kv.groups
        window = ready.context if bounded else plan.window
        return ModelCapacity(
            name=plan.card.name,
            domain=self.domain,
            window=window,
            kv=ready.cost.kv,
            kv_now_bytes=self.granted_kv_bytes,
            fixed_bytes=self.fixed_bytes,
            overhead_bytes=ready.kv_overhead_bytes,
            unit_bytes=ready.kv_unit_bytes,
        )

    def _book(self, kv_bytes: int, tier_bytes: int) -> None:
        needs: Needs = {**self._booking.needs, self._kv_key: kv_bytes, _TIER: tier_bytes}
        self._booking.resize(needs)
