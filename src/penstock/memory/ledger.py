"""The books of every byte that penstock may come to use: who holds how much of what, for what.

Two bounds for each domain (RAM, each GPU):

    budget     booked <= limit, always
    capacity   booked + external <= capacity - spare;  broken, the domain is `short`

External is what others on the machine use: a reading that the governor brings, not a booking. It
may rise at any time, so the second bound can be broken from outside; nothing new is booked then,
while giving back always works. A short domain is the governor's to mend.

Counts only: it reads nothing, waits for nothing and owns no policy. One event loop, no locks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from penstock.errors import Overloaded
from penstock.memory.domains import Domain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Self


class Purpose(StrEnum):
    """What bytes are held for."""

    PROCESS = "process"  # a process before it holds anything of the below
    WEIGHTS = "weights"
    LOADING = "loading"  # what a load needs beside the weights, and only while it runs
    KV = "kv"
    STEP = "step"  # the largest step's temporaries
    GRAPHS = "graphs"
    TIER = "tier"  # KV kept in RAM for a model that computes elsewhere
    QUEUE = "queue"  # KV on its way to disk
    REQUESTS = "requests"  # bodies, texts and token lists
    GRAMMARS = "grammars"  # processes that compile and follow them
    EXITING = "exiting"  # of a process that was told to end and has not been reaped yet


Key = tuple[Domain, Purpose]
Needs = dict[Key, int]


class OutOfBudget(Overloaded):
    """A booking that does not fit now; the numbers say by how much."""

    def __init__(self, domain: Domain, owner: str, needed_bytes: int, state: DomainState) -> None:
        why = (
            f"other programs use {_mib(state.external_bytes)} of {_mib(state.capacity_bytes)}"
            if state.short
            else f"{_mib(state.booked_bytes)} of the limit of {_mib(state.limit_bytes)} are booked"
        )
        super().__init__(
            f"There is no room for {_mib(needed_bytes)} more of {owner} in {domain}: {why}.",
            numbers={
                "reason": "memory",
                "domain": str(domain),
                "needed_bytes": needed_bytes,
                "limit_bytes": max(state.free_bytes, 0),
            },
        )
        self.domain = domain


@dataclass(frozen=True, slots=True)
class DomainState:
    """One domain at one moment."""

    limit_bytes: int
    capacity_bytes: int  # of the machine, the control group or the card, whichever binds
    spare_bytes: int
    external_bytes: int
    booked_bytes: int
    owners: Mapping[str, Mapping[Purpose, int]]  # nothing that is zero

    @property
    def short(self) -> bool:
        """Whether others have taken what was booked."""
        return self.booked_bytes + self.external_bytes > self.capacity_bytes - self.spare_bytes

    @property
    def free_bytes(self) -> int:
        """What can be booked; negative by as much as a bound is broken."""
        outside = self.capacity_bytes - self.spare_bytes - self.external_bytes
        return min(self.limit_bytes, outside) - self.booked_bytes

    def purposes(self) -> dict[Purpose, int]:
        """The booked bytes by what they are for."""
        sums: dict[Purpose, int] = {}
        for held in self.owners.values():
            for purpose, size in held.items():
                sums[purpose] = sums.get(purpose, 0) + size
        return sums


Snapshot = MappingProxyType[Domain, DomainState]


@dataclass(slots=True)
class _DomainBooks:
    limit: int
    capacity: int
    spare: int
    external: int
    booked: int
    held: dict[str, dict[Purpose, int]]  # by owner and purpose; nothing that is zero

    def state(self) -> DomainState:
        owners = {owner: dict(held) for owner, held in self.held.items()}
        return DomainState(
            self.limit, self.capacity, self.spare, self.external, self.booked, owners
        )

    @property
    def free(self) -> int:
        return min(self.limit, self.capacity - self.spare - self.external) - self.booked


class Ledger:
    """The books of one server."""

    def __init__(
        self,
        limits: Mapping[Domain, int],
        capacities: Mapping[Domain, int] | None = None,
        spares: Mapping[Domain, int] | None = None,
    ) -> None:
        capacities, spares = capacities or {}, spares or {}
        self._domains = {
            # A capacity that is not known is no second bound.
            domain: _DomainBooks(
                limit, capacities.get(domain, 1 << 62), spares.get(domain, 0), 0, 0, {}
            )
            for domain, limit in limits.items()
        }
        self._snapshot: Snapshot | None = None
        # Called when bytes came back or a bound moved, to wake those who wait for room. It comes in
        # the middle of a booking and must only take note: whoever wakes books in a later turn.
        self.on_room: Callable[[], None] = lambda: None

    def reserve(self, owner: str, needs: Needs) -> Reservation:
        """Book all of `needs` or, raising `OutOfBudget`, nothing."""
        reservation = Reservation(self, owner)
        reservation.resize(needs)
        return reservation

    def observe(
        self, domain: Domain, external_bytes: int, capacity_bytes: int | None = None
    ) -> None:
        """A reading of what others use, and of which capacity binds."""
        books = self._domains[domain]
        capacity = books.capacity if capacity_bytes is None else capacity_bytes
        if (books.external, books.capacity) == (external_bytes, capacity):
            return
        before = books.free
        books.external, books.capacity = external_bytes, capacity
        self._snapshot = None
        if books.free > before:
            self.on_room()

    def snapshot(self) -> Snapshot:
        """The books now, immutable; the same object until something changes."""
        if self._snapshot is None:
            self._snapshot = MappingProxyType(
                {domain: books.state() for domain, books in self._domains.items()}
            )
        return self._snapshot

    def free(self, domain: Domain) -> int:
        """`snapshot()[domain].free_bytes`, without making a snapshot."""
        return self._domains[domain].free

    def check(self) -> None:
        """The books add up: nothing negative, no zero kept, no domain over its limit."""
        for domain, books in self._domains.items():
            sizes = [size for held in books.held.values() for size in held.values()]
            assert all(books.held.values()), (domain, books.held)
            assert all(size > 0 for size in sizes), (domain, books.held)
            assert books.booked == sum(sizes), domain
            assert books.booked <= books.limit, (domain, books.booked, books.limit)

    def move(self, owner: str, before: Needs, after: Needs) -> None:
        """Change an owner's bookings from `before` to `after`, all or nothing. For reservations."""
        deltas = {
            key: delta
            for key in before | after
            if (delta := after.get(key, 0) - before.get(key, 0))
        }
        growth: dict[Domain, int] = {}
        for (domain, _), delta in deltas.items():
            growth[domain] = growth.get(domain, 0) + delta
        for domain, total in growth.items():
            # What does not grow is always possible, however short the domain is.
            if total > 0 and total > self._domains[domain].free:
                raise OutOfBudget(domain, owner, total, self._domains[domain].state())
        for (domain, purpose), delta in deltas.items():
            books = self._domains[domain]
            held = books.held.setdefault(owner, {})
            size = held.pop(purpose, 0) + delta
            if size:
                held[purpose] = size
            elif not held:
                del books.held[owner]
            books.booked += delta
        if deltas:
            self._snapshot = None
        if any(total < 0 for total in growth.values()):
            self.on_room()


class Reservation:
    """Bytes promised to one owner, kept until `release()` or the end of a `with` block."""

    def __init__(self, ledger: Ledger, owner: str) -> None:
        self.owner = owner
        self._ledger = ledger
        self._needs: Needs = {}

    @property
    def needs(self) -> Needs:
        """What is booked now."""
        return dict(self._needs)

    def total(self, domain: Domain | None = None) -> int:
        """Bytes booked, in one domain or in all."""
        return sum(size for (d, _), size in self._needs.items() if domain in (None, d))

    def resize(self, needs: Needs) -> None:
        """Hold exactly `needs` from now on; all or nothing."""
        assert all(size >= 0 for size in needs.values()), needs
        self._ledger.move(self.owner, self._needs, needs)
        self._needs = dict(needs)

    def mark_exiting(self) -> None:
        """The same bytes, now waiting for the end of the process that holds them."""
        needs: Needs = {}
        for (domain, _), size in self._needs.items():
            key = (domain, Purpose.EXITING)
            needs[key] = needs.get(key, 0) + size
        self.resize(needs)

    def release(self) -> None:
        """Give everything back; once is enough, more does no harm."""
        self.resize({})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"
