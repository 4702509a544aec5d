"""A process that always runs, in the books: the server itself and the template of workers."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from penstock.memory.ledger import OutOfBudget, Purpose

if TYPE_CHECKING:
    from penstock.memory.ledger import Ledger

_KEY = ("ram", Purpose.PROCESS)


class Baseline:
    """Booked by an estimate until it is read, then by what was read."""

    def __init__(self, ledger: Ledger, owner: str, estimate_bytes: int) -> None:
        self.owner = owner
        self.unbooked_bytes = 0  # read, but more than the books have room for
        # The process is there whether the limit has room for the estimate or not.
        size = max(min(estimate_bytes, ledger.free("ram")), 0)
        self._booking = ledger.reserve(owner, {_KEY: size})

    @property
    def booked_bytes(self) -> int:
        """What the books say."""
        return self._booking.total()

    def expect(self, size: int) -> None:
        """The process is about to hold so much more; the next reading says how much it was."""
        with contextlib.suppress(OutOfBudget):
            self._booking.resize({_KEY: self._booking.total() + size})

    def measured(self, size: int) -> int:
        """The process was read to hold `size`; returns by how much the books were short of it."""
        drift = size - self._booking.total()
        try:
            self._booking.resize({_KEY: size})
        except OutOfBudget:
            self.unbooked_bytes = drift
        else:
            self.unbooked_bytes = 0
        return drift
