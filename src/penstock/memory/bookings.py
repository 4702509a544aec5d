"""Reservations that are resized with use: for requests and connections, and for processes.

Those of requests have a floor, booked from the start, so that nobody else can take it; beyond it
every byte is booked before it is used. Those of the processes that always run, the server and the
fork server, follow readings.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from penstock.memory.domains import RAM
from penstock.memory.ledger import OutOfBudget, Purpose

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.memory.ledger import Ledger


_PROCESS = (RAM, Purpose.PROCESS)
_REQUESTS = (RAM, Purpose.REQUESTS)


class GrowingReservation:
    """Bytes of RAM between a floor and a ceiling; used on the event loop only."""

    def __init__(self, ledger: Ledger, owner: str, floor: int, max_bytes: int) -> None:
        self.used_bytes = 0
        self.max_bytes = max_bytes
        self._floor = floor
        self._ledger = ledger
        self._booking = ledger.reserve(owner, {_REQUESTS: floor})

    @property
    def booked_bytes(self) -> int:
        """What the ledger has of it: what is used or the floor, whichever is more."""
        return self._booking.total()

    @property
    def room_bytes(self) -> int:
        """For how much more the ceiling and the ledger have room."""
        beyond = max(self._ledger.free(RAM), 0)
        return min(self.max_bytes, self.booked_bytes + beyond) - self.used_bytes

    def has_room(self, size: int) -> bool:
        """Whether the ceiling and the ledger have room for so much more."""
        used = self.used_bytes + size
        more = used - self.booked_bytes
        return used <= self.max_bytes and (more <= 0 or more <= self._ledger.free(RAM))

    def take(self, size: int) -> bool:
        """Use `size` more bytes, if there is room for them."""
        if not self.has_room(size):
            return False
        self.used_bytes += size
        if self.used_bytes > self.booked_bytes:
            self._booking.resize({_REQUESTS: self.used_bytes})
        return True

    def take_now(self, size: int) -> None:
        """Use `size` more bytes whether there is room or not. Where the ledger has none, more is
        used than booked until the next reading of the process."""
        self.used_bytes += size
        if self.used_bytes > self.booked_bytes:
            with contextlib.suppress(OutOfBudget):
                self._booking.resize({_REQUESTS: self.used_bytes})

    def give(self, size: int) -> None:
        """Use so much less."""
        self.used_bytes -= size
        assert self.used_bytes >= 0
        size = max(self.used_bytes, self._floor)
        if size < self.booked_bytes:
            self._booking.resize({_REQUESTS: size})


class ProcessBooking:
    """Booked by an estimate until it is read, then by what was read."""

    def __init__(self, ledger: Ledger, owner: str, estimate_bytes: int) -> None:
        self.owner = owner
        # What the process holds that is booked under other names.
        self.elsewhere: Callable[[], int] = lambda: 0
        self.unbooked_bytes = 0  # read, but more than the books have room for
        # The process is there whether the limit has room for the estimate or not.
        size = max(min(estimate_bytes, ledger.free(RAM)), 0)
        self._booking = ledger.reserve(owner, {_PROCESS: size})

    @property
    def booked_bytes(self) -> int:
        """What the books say."""
        return self._booking.total()

    def expect(self, size: int) -> None:
        """The process is about to hold so much more; the next reading says how much it was."""
        with contextlib.suppress(OutOfBudget):
            self._booking.resize({_PROCESS: self._booking.total() + size})

    def measured(self, size: int) -> int:
        """The process was read to hold `size`; returns by how much the books were short of it."""
        size = max(size - self.elsewhere(), 0)
        drift = size - self._booking.total()
        try:
            self._booking.resize({_PROCESS: size})
        except OutOfBudget:
            self.unbooked_bytes = drift
        else:
            self.unbooked_bytes = 0
        return drift
