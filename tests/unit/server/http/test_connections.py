"""All connections together: counts, bytes, and who gives way, under any sequence of events."""

from __future__ import annotations

import asyncio
import time

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.memory.bookings import GrowingReservation
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger
from penstock.server.http.connections import OPERATOR_CONNECTIONS, Connections

MOST, SHARE, BASE = 6, 3, 10
ADDRESSES = st.sampled_from(
    ["127.0.0.1", "127.3.2.1", "::1", "192.0.2.1", "192.0.2.2", "2001:db8::1"]
)


class Client:
    """A connection that remembers that it had to go."""

    def __init__(self) -> None:
        self.closed = False
        self.busy = False
        self.waits = False  # for its client
        self.unread = False
        self.held = BASE

    @property
    def rests(self) -> bool:
        return self.waits or not self.busy

    def give_way(self, why: str) -> None:
        self.closed = True

    def look(self) -> None: ...

    def has_unread(self) -> bool:
        return self.unread


class Crowd(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.ledger = Ledger({RAM: 10_000})
        self.memory = GrowingReservation(self.ledger, "connections", 100, 300)
        self.all = Connections(MOST, SHARE, self.memory, usual_bytes=2 * BASE)
        self.clients: list[Client] = []

    def _some(self, number: int) -> Client | None:
        self.clients = [client for client in self.clients if not client.closed]
        return self.clients[number % len(self.clients)] if self.clients else None

    @rule(address=ADDRESSES)
    def come(self, address: str) -> None:
        client = Client()
        before = [one for one in self.clients if not one.closed]
        if self.all.enter(client, address, BASE):
            self.clients.append(client)
        else:
            assert len(self.all) >= MOST
        assert all(one.rests for one in before if one.closed)

    @rule(number=st.integers(0, 99))
    def ask(self, number: int) -> None:
        if (client := self._some(number)) is not None:
            client.busy = True

            client.waits = False

            async def busy() -> None:
                self.all.busy(client)

            self.loop.run_until_complete(busy())

    @rule(number=st.integers(0, 99), waits=st.booleans(), ago_s=st.sampled_from([0.0, 5.0]))
    def wait(self, number: int, *, waits: bool, ago_s: float) -> None:
        if (client := self._some(number)) is not None:
            client.waits = waits and client.busy
            self.all.awaits_client(client, time.monotonic() - ago_s if waits else None)

    @rule(number=st.integers(0, 99), key=st.sampled_from(["key 1", "key 2"]))
    def show_a_key(self, number: int, key: str) -> None:
        if (client := self._some(number)) is not None:
            self.all.shown_key(client, key)

    @rule(number=st.integers(0, 99))
    def ask_for_a_place(self, number: int) -> None:
        if (client := self._some(number)) is not None:
            self.all.admits(client)

    @rule(number=st.integers(0, 99))
    def be_answered(self, number: int) -> None:
        if (client := self._some(number)) is not None and client.busy:
            client.busy = client.waits = False
            self.all.idle(client)

    @rule(number=st.integers(0, 99), size=st.integers(BASE, 200))
    def hold(self, number: int, size: int) -> None:
        if (client := self._some(number)) is None:
            return
        if self.all.hold(client, size):
            client.held = size
        else:
            idle = [one for one in self.clients if one is not client and not one.busy]
            assert all(one.closed or one.held < size for one in idle)
            self.all.leave(client)
            client.closed = True

    @rule(number=st.integers(0, 99))
    def leave(self, number: int) -> None:
        if (client := self._some(number)) is not None:
            self.all.leave(client)
            client.closed = True

    @invariant()
    def sums(self) -> None:
        self.all.check()
        self.ledger.check()
        here = [client for client in self.clients if not client.closed]
        assert len(self.all) == len(here) <= MOST + OPERATOR_CONNECTIONS
        admitted = [client for client in here if self.all.admits(client)]
        assert sum(not client.closed for client in admitted) <= MOST

    def teardown(self) -> None:
        for client in self.clients:
            self.all.leave(client)
        assert self.memory.used_bytes == 0
        self.loop.close()


TestCrowd = Crowd.TestCase
TestCrowd.settings = settings(stateful_step_count=40)


def test_the_client_with_the_most_gives_way_and_its_oldest_first() -> None:
    crowd = Connections(4)
    hog, guest = [Client() for _ in range(3)], Client()
    assert crowd.enter(guest, "192.0.2.1", 0)
    for client in hog:
        assert crowd.enter(client, "192.0.2.2", 0)
    assert crowd.enter(Client(), "192.0.2.3", 0)
    assert [client.closed for client in (guest, *hog)] == [False, True, False, False]


def test_a_place_beyond_the_most_makes_no_way_for_a_client() -> None:
    async def crowd() -> None:
        every = Connections(2)
        for client in (busy := [Client(), Client()]):
            assert every.enter(client, "127.0.0.1", 0)
            every.busy(client)
        assert every.enter(operator := Client(), "127.0.0.1", 0)
        assert every.enter(guest := Client(), "192.0.2.1", 0)
        assert operator.closed
        assert [every.admits(client) for client in (*busy, guest)] == [True, True, False]

    asyncio.run(crowd())


def full(
    most: int, *crowds: tuple[str, int], waits: bool = True
) -> tuple[Connections, list[Client]]:
    """Places taken by requests of these addresses, the first of which waits for longest."""
    every, clients = Connections(most), []

    async def come() -> None:
        for address, count in crowds:
            for number in range(count):
                clients.append(client := Client())
                assert every.enter(client, address, 0)
                every.busy(client)
                if waits:
                    every.awaits_client(client, time.monotonic() - 100 + number)

    asyncio.run(come())
    assert len(every) == most
    return every, clients


def test_requests_that_wait_for_their_client_give_way_the_slowest_of_the_largest_first() -> None:
    every, clients = full(5, ("192.0.2.1", 2), ("192.0.2.2", 3))
    for number in range(3):
        assert every.enter(guest := Client(), f"192.0.2.{10 + number}", 0)
        assert every.admits(guest)
    assert [client.closed for client in clients] == [True, False, True, True, False]


def test_of_one_client_alone_the_slowest_gives_way_to_the_next() -> None:
    every, clients = full(3, ("127.0.0.1", 3))
    assert every.enter(guest := Client(), "127.0.0.1", 0)
    assert every.admits(guest)
    assert [client.closed for client in clients] == [True, False, False]


def test_a_client_with_fewer_connections_loses_none() -> None:
    every, clients = full(4, ("192.0.2.1", 1), ("192.0.2.2", 3))
    for client in clients[1:]:
        every.awaits_client(client, None)  # at work
    assert every.enter(another := Client(), "192.0.2.2", 0)
    assert not every.admits(another)
    assert not any(client.closed for client in clients)


def test_what_is_at_work_gives_way_only_to_a_client_with_fewer() -> None:
    every, clients = full(4, ("192.0.2.1", 1), ("192.0.2.2", 3), waits=False)
    guests = [Client() for _ in range(2)]
    assert every.enter(guests[0], "192.0.2.3", 0)
    assert not any(client.closed for client in clients)  # it may be an operator
    assert every.admits(guests[0])
    assert [client.closed for client in clients] == [False, False, False, True]
    every.busy(guests[0])
    assert every.enter(guests[1], "192.0.2.1", 0)
    assert not every.admits(guests[1])


def test_connections_count_as_their_keys() -> None:
    every, clients = full(4, ("127.0.0.1", 4))
    for client in clients[1:]:
        every.shown_key(client, "key 1")
    assert every.enter(Client(), "127.0.0.1", 0)
    assert [client.closed for client in clients] == [False, True, False, False]


def test_who_only_just_waits_gives_way_after_those_that_are_idle() -> None:
    every, clients = full(3, ("192.0.2.1", 2), ("192.0.2.2", 1))
    for client in clients[:2]:
        every.awaits_client(client, time.monotonic())
    every.idle(clients[2])
    every._places[clients[2]].since -= 100
    assert every.enter(Client(), "192.0.2.3", 0)
    assert [client.closed for client in clients] == [False, False, True]


def test_who_has_sent_a_request_that_is_not_read_yet_is_spared_among_the_idle() -> None:
    every, clients = full(3, ("127.0.0.1", 3))
    for client in clients:
        every.idle(client)
    clients[0].unread = True
    assert every.enter(Client(), "127.0.0.1", 0)
    assert [client.closed for client in clients] == [False, True, False]


def test_where_all_have_sent_the_longest_idle_gives_way() -> None:
    every, clients = full(2, ("127.0.0.1", 2))
    for client in clients:
        every.idle(client)
        client.unread = True
    assert every.enter(Client(), "127.0.0.1", 0)
    assert [client.closed for client in clients] == [True, False]


def test_requests_that_wait_for_their_client_give_way_for_bytes() -> None:
    async def crowd() -> None:
        memory = GrowingReservation(Ledger({RAM: 10_000}), "connections", 100, 300)
        every = Connections(100, 0, memory, usual_bytes=110)
        slow = [Client() for _ in range(3)]
        for client in slow:
            assert every.enter(client, "192.0.2.1", 100)
            every.busy(client)
            every.awaits_client(client, 1.0)
        assert every.enter(guest := Client(), "192.0.2.2", BASE)
        assert every.hold(guest, 100)
        assert [client.closed for client in slow] == [True, False, False]
        assert not every.hold(guest, 290)  # it would be the one that holds the most
        assert [client.closed for client in slow] == [True, False, False]

    asyncio.run(crowd())


def test_who_holds_most_gives_way_for_bytes() -> None:
    memory = GrowingReservation(Ledger({RAM: 10_000}), "connections", 100, 300)
    crowd = Connections(100, 0, memory, usual_bytes=BASE)
    probe, *heads = [Client() for _ in range(4)]
    assert crowd.enter(probe, "127.0.0.1", BASE)
    for head in heads:
        assert crowd.enter(head, "127.0.0.1", BASE)
    assert crowd.hold(heads[0], 100)
    assert crowd.hold(heads[1], 150)
    assert crowd.hold(heads[2], 120)
    assert [client.closed for client in (probe, *heads)] == [False, False, True, False]
    assert not crowd.hold(heads[0], 200)  # it would hold more than any other
    assert [client.closed for client in (probe, *heads)] == [False, False, True, False]


def test_operators_come_through_when_connections_have_no_memory_left() -> None:
    async def crowd() -> None:
        memory = GrowingReservation(Ledger({RAM: 10_000}), "connections", 100, 300)
        every = Connections(100, 0, memory)
        first = Client()
        assert every.enter(first, "127.0.0.1", 300)
        every.busy(first)
        late = [Client() for _ in range(OPERATOR_CONNECTIONS)]
        for one in late:
            assert every.enter(one, "127.0.0.1", BASE)
            every.busy(one)
        assert not any(map(every.admits, late))  # only what is for operators
        assert not every.enter(Client(), "127.0.0.1", BASE)
        every.leave(first)
        assert every.enter(client := Client(), "127.0.0.1", BASE)
        assert every.admits(client)

    asyncio.run(crowd())


def test_turns_keep_their_pace_when_each_asks_for_another() -> None:
    """Were a further timer set for every turn, the event loop would soon do nothing else."""
    turns = 0

    async def crowd() -> None:
        every = Connections()

        def take_up() -> None:
            nonlocal turns
            turns += 1
            every.in_turn(take_up)

        for _ in range(40):
            every.in_turn(take_up)
        await asyncio.sleep(0.3)

    asyncio.run(crowd())
    assert 0 < turns <= 2 * 31
