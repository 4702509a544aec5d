"""All connections together: how many there may be, of whom, what they hold, and who gives way.

A connection without a request in hand is idle, however many bytes of a head it has sent. One whose
request has not come to its end, or whose answer is not read, waits for its client. Any other is at
work. A client is who has shown a key, otherwise an address.

When there are too many connections one is closed, of the client with the most: the longest idle, or
the one that has kept the server waiting for longest. A client that has fewer than the newcomer's
loses none. Requests at work give way only to a client that has fewer, the youngest first. When
connections have no bytes left, the idle one that holds the most is closed, then one of the client
that holds the most. If there is none a newcomer is refused; a few are let in all the same, for
requests of operators only.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.server.http.peer import group_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.memory.bookings import GrowingReservation

_MIB = 1 << 20
OPERATOR_CONNECTIONS = 16  # beyond the most that clients may have
_LOOK_EVERY_S = 0.25
# Who is idle or kept the server waiting for less is closed only where nobody else is.
_SLOW_S = 1.0
_USUAL_BYTES = 32 << 10  # of a request with an ordinary head
# Requests sent before the last answer was read are taken up at this pace, over all connections, so
# that clients who wait for their answers come first.
_PACE_S = 0.01
_PACE = 2
_LOOKED_AT = 8  # of the longest idle, for one without a request that is not read yet
_UNBOUNDED = 1 << 30


def connection_bytes(limit_bytes: int) -> tuple[int, int]:
    """What is always kept for connections and their heads, and the most that they get."""
    floor = max(2 * _MIB, min(limit_bytes // 256, 64 * _MIB))
    return floor, max(floor, limit_bytes // 32)


class Member(Protocol):
    """A connection, as far as the others are concerned."""

    def give_way(self, why: str) -> None:
        """Close at once: another needs its place."""

    def look(self) -> None:
        """See whether the client is still there."""

    def has_unread(self) -> bool:
        """Whether its client has sent something that nobody has read yet."""


_Members = dict[str, dict[Member, None]]  # by client


@dataclass(slots=True)
class Place:
    """What one connection has of the whole."""

    address: str  # the group that its limit is for
    client: str
    among: _Members | None = None  # those that are idle, or wait for their clients; None: at work
    since: float = 0.0  # when that began, on the monotonic clock
    for_operators: bool = False  # beyond the most: other requests are refused
    beyond_memory: bool = False  # likewise, because connections have no more memory
    held_bytes: int = 0


class Connections:
    """The connections of one server; used on its event loop only."""

    def __init__(
        self,
        max_connections: int = _UNBOUNDED,
        per_client: int = 0,
        memory: GrowingReservation | None = None,
        usual_bytes: int = _USUAL_BYTES,  # for more only those give way that hold as much
    ) -> None:
        self.max_connections = max_connections
        self.per_client = (
            per_client or max_connections
        )  # of one client, if it is not on this machine
        self.refused = 0
        self.gave_way = 0
        self._memory = memory
        self._usual_bytes = usual_bytes
        self._places: dict[Member, Place] = {}
        self._of_address: Counter[str] = Counter()
        self._count: Counter[str] = Counter()  # by client, and so are the bytes
        self._bytes: Counter[str] = Counter()
        self._idle: _Members = {}  # the longest idle first
        self._waiting: _Members = {}  # for their clients
        self._beyond_memory = 0  # places that are
        self._looking: asyncio.TimerHandle | None = None
        self._paced: deque[Callable[[], None]] = deque()
        self._pacing: asyncio.TimerHandle | None = None
        # Read into and taken over at once, by one connection at a time.
        self.buffer = bytearray(16 << 10)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def held_bytes(self) -> int:
        """By all of them."""
        return sum(place.held_bytes for place in self._places.values())

    @property
    def booked_bytes(self) -> int:
        """Of all of them, in the books."""
        return 0 if self._memory is None else self._memory.used_bytes

    def enter(self, member: Member, address: str, size: int) -> bool:
        """Take a place for a new connection that holds `size` bytes from the start; False if there
        is none, not even for operators."""
        group = group_of(address)
        if self._of_address[group] >= self._allowed(group):
            self._make_way(self._count, group, lambda place: place.address == group)
        if len(self._places) >= self.max_connections:
            self._make_way(self._count, group, _anyone)
        # Who gave way may have had a place beyond the most itself.
        crowded = len(self._places) >= self.max_connections
        place = Place(group, group)
        place.for_operators = crowded or self._of_address[group] >= self._allowed(group)
        if len(self._places) >= self.max_connections + OPERATOR_CONNECTIONS:
            self.refused += 1
            return False
        self._places[member] = place
        self._of_address[group] += 1
        self._count[group] += 1
        self._put(member, place, self._idle, time.monotonic())
        if self.hold(member, size):
            return True
        # No memory for clients' connections: operators have a little beyond it.
        if self._beyond_memory < OPERATOR_CONNECTIONS:
            place.beyond_memory = True
            self._beyond_memory += 1
            return self.hold(member, size)
        self.leave(member)
        self.refused += 1
        return False

    def admits(self, member: Member) -> bool:
        """Whether it may bring a client's request, not only an operator's."""
        place = self._places.get(member)
        if place is None or place.beyond_memory:
            return False
        if place.for_operators:
            full = len(self._places) > self.max_connections
            if full:  # it may have the place of one that is not for operators only
                full = not self._make_way(self._count, place.client, _is_admitted, at_work=True)
            over = self._of_address[place.address] > self._allowed(place.address)
            place.for_operators = full or over
        return not place.for_operators

    def leave(self, member: Member) -> None:
        """The connection is gone, with all that it held."""
        place = self._places.get(member)
        if place is None:
            return
        self._put(member, place, None)
        del self._places[member]
        self._beyond_memory -= place.beyond_memory
        _add(self._of_address, place.address, -1)
        _add(self._count, place.client, -1)
        _add(self._bytes, place.client, -place.held_bytes)
        if self._memory is not None:
            self._memory.give(place.held_bytes)

    def hold(self, member: Member, size: int) -> bool:
        """It holds so many bytes from now on, for which others may have to give way."""
        place = self._places.get(member)
        if place is None:
            return False
        more = size - place.held_bytes
        if self._memory is not None:
            if more <= 0:
                self._memory.give(-more)
            elif place.beyond_memory:
                self._memory.take_now(more)
            else:
                while not self._memory.take(more):
                    if not self._free_bytes(member, size):
                        return False
        place.held_bytes = size
        _add(self._bytes, place.client, more)
        return True

    def busy(self, member: Member) -> None:
        """It has a request in hand."""
        if (place := self._places.get(member)) is not None:
            self._put(member, place, None)
            if self._looking is None:
                self._look_later()

    def idle(self, member: Member) -> None:
        """Its requests are answered."""
        place = self._places.get(member)
        if place is not None and place.among is not self._idle:
            self._put(member, place, self._idle, time.monotonic())

    def awaits_client(self, member: Member, since: float | None) -> None:
        """It waits for its client to send or to read on, since then; None: it is at work."""
        place = self._places.get(member)
        if place is not None and place.among is not self._idle:
            self._put(member, place, None if since is None else self._waiting, since or 0.0)

    def shown_key(self, member: Member, client: str) -> None:
        """Its request has shown a key, as whose it counts from now on."""
        place = self._places.get(member)
        if place is None or place.client == client:
            return
        among, since = place.among, place.since
        self._put(member, place, None)
        for counts, size in ((self._count, 1), (self._bytes, place.held_bytes)):
            _add(counts, place.client, -size)
            _add(counts, client, size)
        place.client = client
        self._put(member, place, among, since)

    def in_turn(self, take_up: Callable[[], None]) -> None:
        """Have a connection take up its next request when those before it have had their turn."""
        self._paced.append(take_up)
        if self._pacing is None:
            self._take_up_later()

    def _take_up(self) -> None:
        for _ in range(min(_PACE, len(self._paced))):
            self._paced.popleft()()  # which may ask for another turn
        self._pacing = None
        if self._paced:
            self._take_up_later()

    def _take_up_later(self) -> None:
        self._pacing = asyncio.get_running_loop().call_later(_PACE_S, self._take_up)

    def check(self) -> None:
        """The sums agree."""
        places = self._places.values()
        assert Counter(place.address for place in places) == self._of_address
        assert Counter(place.client for place in places) == self._count
        assert all(self._bytes.values())
        for among in (self._idle, self._waiting, None):
            noted = {member for client in (among or {}).values() for member in client}
            there = {member for member, place in self._places.items() if place.among is among}
            assert among is None or noted == there
        assert len(self._places) <= self.max_connections + OPERATOR_CONNECTIONS
        assert self._bytes.total() == self.held_bytes
        if self._memory is not None:
            assert self._memory.used_bytes == self.held_bytes

    def _allowed(self, address: str) -> int:
        return self.max_connections if address == "loopback" else self.per_client

    def _put(
        self, member: Member, place: Place, among: _Members | None, since: float = 0.0
    ) -> None:
        """Among those it belongs to from now on, behind the others."""
        if place.among is not None:
            del place.among[place.client][member]
            if not place.among[place.client]:
                del place.among[place.client]
        place.among, place.since = among, since
        if among is not None:
            among.setdefault(place.client, {})[member] = None

    def _make_way(
        self,
        shares: Counter[str],
        own: str,
        fits: Callable[[Place], bool],
        *,
        at_work: bool = False,
    ) -> bool:
        """Close one that fits, of the client that has the largest share, if that is no less than
        what the client `own` has; False if there is none."""
        resting = dict.fromkeys([*self._idle, *self._waiting])
        clients = [client for client in resting if shares[client] >= shares[own]]
        clients.sort(key=lambda client: -shares[client])
        now = time.monotonic()
        for until in (now - _SLOW_S, now):
            for client in clients:
                if (member := self._slowest(client, until, fits)) is not None:
                    self._close(member)
                    return True
        largest = max(shares, key=lambda client: shares[client], default=own)
        if not at_work or shares[largest] <= shares[own] + 1:
            return False
        for member, place in reversed(self._places.items()):
            if place.client == largest and place.among is None and fits(place):
                self._close(member)
                return True
        return False

    def _slowest(self, client: str, until: float, fits: Callable[[Place], bool]) -> Member | None:
        """Of a client's connections that are idle, or else wait for it, since then or longer: the
        one that is for longest."""
        idle = itertools.takewhile(
            lambda member: self._places[member].since <= until, self._idle.get(client, ())
        )
        longest = list(itertools.islice((m for m in idle if fits(self._places[m])), _LOOKED_AT))
        if longest:
            # One that has just come may have its request in the socket, and would be reset.
            return next((member for member in longest if not member.has_unread()), longest[0])
        waiting = (
            member
            for member in self._waiting.get(client, ())
            if self._places[member].since <= until and fits(self._places[member])
        )
        return min(waiting, key=lambda member: self._places[member].since, default=None)

    def _free_bytes(self, member: Member, size: int) -> bool:
        """Close the idle connection that holds the most, the longest idle of those, or else one of
        the client that holds the most; False if there is none. Small heads do not give way to long
        ones."""
        idle = (other for group in self._idle.values() for other in group if other is not member)
        largest = max(idle, key=self._bytes_and_age, default=None)
        if largest is not None and self._places[largest].held_bytes >= size:
            self._close(largest)
            return True
        own = self._places[member]
        return self._make_way(
            self._bytes,
            own.client,
            lambda place: place is not own and size <= max(self._usual_bytes, place.held_bytes),
        )

    def _bytes_and_age(self, member: Member) -> tuple[int, float]:
        place = self._places[member]
        return place.held_bytes, -place.since

    def _close(self, member: Member) -> None:
        self.gave_way += 1
        self.leave(member)
        member.give_way("The server has more connections than it can keep.")

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        self._looking = None
        busy = [m for m, place in self._places.items() if place.among is not self._idle]
        for member in busy:
            member.look()
        if busy:
            self._look_later()


def _add(counts: Counter[str], name: str, size: int) -> None:
    counts[name] += size
    if not counts[name]:
        del counts[name]


def _anyone(_: Place) -> bool:
    return True


def _is_admitted(place: Place) -> bool:
    return not place.for_operators
