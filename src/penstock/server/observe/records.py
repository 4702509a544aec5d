"""Everything that is kept for those who watch, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.server.observe import refusals as kept_refusals
from penstock.server.observe.broadcast import Broadcast
from penstock.server.observe.rates import TokenRates
from penstock.server.observe.refusals import Refusals
from penstock.server.observe.tasks import Tasks
from penstock.server.observe.timeline import Timeline

if TYPE_CHECKING:
    from penstock.memory.bookings import GrowingReservation
    from penstock.memory.events import Events

_EVENTS_KEPT = 512
_POINTS_KEPT = 12


@dataclass(slots=True)
class Records:
    """Of one server."""

    broadcast: Broadcast
    refusals: Refusals = field(default_factory=Refusals)
    timeline: Timeline = field(default_factory=Timeline)
    rates: TokenRates = field(default_factory=TokenRates)
    tasks: Tasks = field(default_factory=Tasks)


def open_records(events: Events, memory: GrowingReservation) -> Records:
    """Records that hear of every event and refusal; what they keep is booked in `memory`."""
    logs = {"event": _EVENTS_KEPT, "refusal": kept_refusals.KEPT, "timeline": _POINTS_KEPT}
    records = Records(Broadcast(logs, memory))
    events.listeners.append(lambda row: records.broadcast.append("event", row))
    records.refusals.on_add = lambda row: records.broadcast.append("refusal", row)
    return records
