"""Rows of the stream: ids, states, logs, slow readers, and what is booked for them."""

from __future__ import annotations

import asyncio
import json

import pytest

from penstock.errors import Overloaded
from penstock.memory.bookings import GrowingReservation
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger
from penstock.server.observe.broadcast import BATCH_BYTES, MAX_READERS, Broadcast

LIMIT = 1 << 24


def broadcast(kept: int = 3) -> Broadcast:
    memory = GrowingReservation(Ledger({RAM: LIMIT}), "admin stream", 0, LIMIT)
    return Broadcast({"event": kept}, memory, first_id=100)


def rows(frames: bytes) -> list[tuple[int | None, str, dict[str, object]]]:
    """(id, kind, object) of each event."""
    found = []
    for block in frames.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        number = int(fields["id"]) if "id" in fields else None
        found.append((number, fields["event"], json.loads(fields["data"])))
    return found


def test_a_reader_is_sent_what_came_since() -> None:
    hub = broadcast()
    hub.append("event", {"n": 1})
    cursor, frames = hub.since(None)
    assert rows(frames) == [(101, "event", {"n": 1})]
    assert hub.since(cursor).frames == b""
    hub.append("event", {"n": 2})
    assert rows(hub.since(cursor).frames) == [(102, "event", {"n": 2})]
    assert rows(hub.since(101).frames) == [(102, "event", {"n": 2})]
    hub.check()


def test_of_a_state_only_the_latest_is_kept_and_only_changes_count() -> None:
    hub = broadcast()
    assert hub.replace("memory", {"bytes": 1})
    assert not hub.replace("memory", {"bytes": 1})
    cursor = hub.since(None).cursor
    assert hub.since(cursor).frames == b""
    for size in range(2, 1000):
        assert hub.replace("memory", {"bytes": size})
    [(_, kind, state)] = rows(hub.since(cursor).frames)
    assert (kind, state["bytes"]) == ("memory", 999)
    assert isinstance(state["at"], float)
    hub.check()
    hub.forget_states()
    assert hub.since(None).frames == b""
    hub.check()


def test_a_slow_reader_is_told_that_it_lost_rows_of_a_log() -> None:
    hub = broadcast(kept=3)
    hub.append("event", {"n": 0})
    cursor = hub.since(None).cursor
    for number in range(1, 6):
        hub.append("event", {"n": number})
    gap, *kept = rows(hub.since(cursor).frames)
    assert gap == (None, "gap", {"after": cursor})
    assert [row["n"] for _, _, row in kept] == [3, 4, 5]
    # One who comes for the first time has lost nothing.
    assert [kind for _, kind, _ in rows(hub.since(None).frames)] == ["event"] * 3
    hub.check()


def test_rows_are_sent_in_batches_and_none_is_lost_between_them() -> None:
    hub = broadcast(kept=100)
    for number in range(50):
        hub.append("event", {"n": number, "words": "x" * 1000})
    cursor, seen, batches = 0, [], 0
    while frames := (news := hub.since(cursor)).frames:
        cursor, batches = news.cursor, batches + 1
        assert len(frames) <= BATCH_BYTES
        seen += [row["n"] for _, _, row in rows(frames)]
    assert seen == list(range(50))
    assert batches > 1


def test_a_log_is_bounded_in_bytes_too() -> None:
    hub = broadcast(kept=1000)
    for number in range(1000):
        hub.append("event", {"n": number, "words": "x" * 4000})
        hub.check()
    assert rows(hub.since(hub.last_id - 1).frames)[0][2]["n"] == 999


def test_kinds_are_filtered() -> None:
    hub = broadcast()
    hub.append("event", {})
    hub.replace("memory", {"bytes": 1})
    assert [kind for _, kind, _ in rows(hub.since(None, {"memory"}).frames)] == ["memory"]
    assert [kind for _, kind, _ in rows(hub.since(None, {"event"}).frames)] == ["event"]


def test_an_id_of_another_server_begins_anew() -> None:
    hub = broadcast()
    hub.append("event", {"n": 1})
    assert rows(hub.since(10**15).frames) == [(101, "event", {"n": 1})]


def test_there_are_only_so_many_readers() -> None:
    hub = broadcast()
    places = [hub.reading() for _ in range(MAX_READERS)]
    for place in places:
        place.__enter__()
    with pytest.raises(Overloaded, match=str(MAX_READERS)):
        hub.reading()
    places[0].__exit__()
    with hub.reading():
        assert hub.readers == MAX_READERS


def test_readers_wake_for_a_row_and_for_the_end() -> None:
    async def read() -> list[bool]:
        hub = broadcast()
        first = asyncio.ensure_future(hub.wait(hub.last_id))
        await asyncio.sleep(0)
        hub.append("event", {})
        second = asyncio.ensure_future(hub.wait(hub.last_id))
        told = [await first]
        await asyncio.sleep(0)
        assert not second.done()
        hub.close()
        return [*told, await second]

    assert asyncio.run(read()) == [True, False]
