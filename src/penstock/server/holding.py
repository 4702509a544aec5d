"""What one worker holds: its booking, and the KV and step bytes it was granted.

The books rise before a grant is sent and fall only when the worker has answered that it holds no
more. Knows the worker's client and the books, not why memory moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ModelTooLarge
from penstock.memory.admission import ModelRoom
from penstock.memory.ledger import Purpose
from penstock.wire import Grant, Shed

if TYPE_CHECKING:
    import asyncio

    from penstock.memory.ledger import Ledger, Needs, Reservation
    from penstock.server.client import ModelClient
    from penstock.server.plans import ModelPlan
    from penstock.wire import Freed


class Holding:
    """The bytes of one worker, from its load to its end."""

    def __init__(self, ledger: Ledger, plan: ModelPlan, booking: Reservation) -> None:
        self.plan = plan
        self.domain = plan.domain
        self.need = plan.load_need()
        self._ledger = ledger
        self._booking = booking
        self._kv_key = (self.domain, Purpose.KV)
        self.granted_kv_bytes = booking.needs.get(self._kv_key, 0)
        self._step_bytes = booking.needs.get((self.domain, Purpose.STEP), 0)
        self._client: ModelClient | None = None
        self._latest: asyncio.Future[Freed | None] | None = None

    @property
    def kv_bytes(self) -> int:
        """KV as booked: what was granted, or more while the worker still gives back."""
        return self._booking.needs.get(self._kv_key, 0)

    @property
    def fixed_bytes(self) -> int:
        """Everything else in the domain it computes in."""
        return self._booking.total(self.domain) - self.kv_bytes

    @property
    def total_bytes(self) -> int:
        """All of it, in every domain."""
        return self._booking.total()

    def move_in(self, client: ModelClient) -> None:
        """The load is over: book what it measured instead of what it was thought to need.

        More than was thought comes out of the KV; if too little is left, the model does not fit.
        """
        ready = client.ready
        fixed = {key: size for key, size in self._booking.needs.items() if key != self._kv_key}
        fixed.pop((self.domain, Purpose.LOADING), None)
        fixed[self.domain, Purpose.WEIGHTS] = ready.weight_bytes
        if ready.overhead_bytes:
            fixed["ram", Purpose.PROCESS] = ready.overhead_bytes
        if ready.graph_bytes:
            fixed[self.domain, Purpose.GRAPHS] = ready.graph_bytes
        if ready.step_bytes:
            fixed[self.domain, Purpose.STEP] = self._step_bytes = ready.step_bytes
        held = sum(size for (domain, _), size in fixed.items() if domain == self.domain)
        room = self._ledger.free(self.domain) + self._booking.total(self.domain) - held
        least = min(self.need.kv_least_bytes, ready.kv_bytes)
        if room < least:
            raise ModelTooLarge(
                f"The model {self.plan.card.name!r} holds {held} bytes of {self.domain} beside its "
                f"KV, as measured, which leaves {max(room, 0)} of the {least} that its smallest KV "
                "needs. Raise memory.limit, or lower step_tokens or step_sequences of the model.",
                numbers={
                    "reason": "memory",
                    "domain": self.domain,
                    "needed_bytes": held + least,
                    "limit_bytes": held + max(room, 0),
                },
            )
        self._client = client
        kv_bytes = min(room, ready.kv_bytes, self.need.kv_most_bytes)
        self._booking.resize({**fixed, self._kv_key: kv_bytes})
        self.granted_kv_bytes = kv_bytes
        if kv_bytes < ready.kv_bytes:
            self._order(Grant(kv_bytes, self._step_bytes))

    def grow(self, kv_bytes: int) -> None:
        """Book and grant so much KV; `OutOfBudget` if it does not fit."""
        assert self._client is not None
        self._book(max(kv_bytes, self.kv_bytes))
        self.granted_kv_bytes = kv_bytes
        self._order(Grant(kv_bytes, self._step_bytes))

    async def shrink(self, kv_bytes: int) -> None:
        """Have the worker hold no more KV than this, or than its running requests need; the books
        fall when it has answered."""
        self.granted_kv_bytes = kv_bytes = max(kv_bytes, 0)
        await self._order(Grant(kv_bytes, self._step_bytes))

    async def shed_caches(self) -> None:
        """Have it give back what its allocators keep for later."""
        await self._order(Shed(0))

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
        self._book(self.granted_kv_bytes)

    def measured(self, private_bytes: int) -> int:
        """The process was read to hold so much RAM; by how much it is more than what is booked."""
        return private_bytes - self._booking.total("ram")

    def settle(self) -> None:
        """The process was told to end; its bytes are out of use but not back."""
        self._booking.settle()

    def release(self) -> None:
        """The process is gone, and with it every byte."""
        self._booking.release()

    def room(self) -> ModelRoom:
        """The loaded model as admission sees it."""
        plan = self.plan
        if self._client is None:
            return plan.room()
        ready = self._client.ready
        # Below what the KV holds, the context is the window that the worker found.
        window = ready.context if ready.context < ready.kv_tokens else plan.window
        return ModelRoom(
            name=plan.card.name,
            domain=self.domain,
            window=window,
            kv_bytes_per_token=ready.kv_bytes_per_token,
            block_tokens=ready.cost.block_tokens,
            kv_now_bytes=self.granted_kv_bytes,
            fixed_bytes=self.fixed_bytes,
            overhead_bytes=max(ready.kv_bytes - ready.kv_tokens * ready.kv_bytes_per_token, 0),
        )

    def _book(self, kv_bytes: int) -> None:
        needs: Needs = {**self._booking.needs, self._kv_key: kv_bytes}
        self._booking.resize(needs)
