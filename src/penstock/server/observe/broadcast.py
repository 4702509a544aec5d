"""Rows for everyone who watches: encoded once, kept in bounded rings, read by each at its pace.

A kind of row is a *state*, of which only the latest matters, or a *log*, of which the latest so
many are kept. No reader has a queue: it remembers the id of the last row that it was sent and asks
for those since, so a slow one misses states in between, and is told when it lost rows of a log.
Knows rows and bytes, not what is in them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from penstock.memory.bookings import GrowingReservation

MAX_READERS = 32
BATCH_BYTES = 16 << 10  # several rows that are sent as one; a row may be longer by itself
_LOG_BYTES = 128 << 10  # of one log, however many rows it may have
_ROW_BYTES = 200  # of the process for a row, beside its frame


class Row(NamedTuple):
    """One row, as it is sent."""

    id: int
    kind: str
    frame: bytes


class News(NamedTuple):
    """What a reader is sent next."""

    cursor: int  # where it stands afterwards
    frames: bytes


@dataclass(slots=True)
class _Log:
    most: int
    rows: deque[Row] = field(default_factory=deque)
    size: int = 0
    forgotten_id: int = 0  # of the latest row that is not kept any more

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.size += len(row.frame) + _ROW_BYTES
        while len(self.rows) > self.most or (self.size > _LOG_BYTES and len(self.rows) > 1):
            oldest = self.rows.popleft()
            self.size -= len(oldest.frame) + _ROW_BYTES
            self.forgotten_id = oldest.id


class Broadcast:
    """The rows of one server; used on its event loop only."""

    def __init__(
        self, logs: Mapping[str, int], memory: GrowingReservation, first_id: int | None = None
    ) -> None:
        # Milliseconds since 1970: ids go on increasing over a restart.
        self._id = int(time.time() * 1000) if first_id is None else first_id
        self._logs = {kind: _Log(most) for kind, most in logs.items()}
        self._states: dict[str, Row] = {}
        self._bodies: dict[str, bytes] = {}  # of states, to see whether one has changed
        self._memory = memory
        self._news = asyncio.Event()
        self._readers = 0
        self._closed = False

    @property
    def readers(self) -> int:
        """How many read now."""
        return self._readers

    @property
    def last_id(self) -> int:
        """Of the latest row."""
        return self._id

    def append(self, kind: str, content: object) -> None:
        """One more row of a log."""
        log = self._logs[kind]
        log.add(self._row(kind, msgspec.json.encode(content)))
        self._publish()

    def replace(self, kind: str, content: Mapping[str, object]) -> bool:
        """The state is this now; a row if it differs from the latest. Gets the time added."""
        body = msgspec.json.encode(content)
        if self._bodies.get(kind) == body:
            return False
        self._bodies[kind] = body
        stamp = b'{"at":%.3f' % time.time()
        whole = stamp + b"," + body[1:] if len(body) > 2 else stamp + b"}"
        self._states[kind] = self._row(kind, whole)
        self._publish()
        return True

    def forget_states(self) -> None:
        """Nobody reads: what is kept of states is given back."""
        self._states.clear()
        self._bodies.clear()
        self._book()

    def since(self, cursor: int | None, kinds: Collection[str] | None = None) -> News:
        """The rows after that id; without one the latest states and all rows of logs."""
        # An id that is yet to come is of another server.
        start = 0 if cursor is None or cursor > self._id else cursor
        rows: list[Row] = []
        lost = False
        for kind, log in self._logs.items():
            if kinds is None or kind in kinds:
                rows += [row for row in log.rows if row.id > start]
                lost |= start > 0 and log.forgotten_id > start
        rows += [
            row
            for kind, row in self._states.items()
            if row.id > start and (kinds is None or kind in kinds)
        ]
        rows.sort()
        sent = rows[: _batch_length(rows)]
        # A batch of one row is the row's own bytes, which all readers share.
        frames = b"".join([row.frame for row in sent])
        if lost:
            # Without an id of its own: a reader that comes back is told again.
            frames = b'event: gap\ndata: {"after":%d}\n\n%b' % (start, frames)
        return News(sent[-1].id if len(sent) < len(rows) else self._id, frames)

    async def wait(self, cursor: int) -> bool:
        """Until there is a row after that id; False once nothing more will come."""
        while self._id <= cursor and not self._closed:
            await self._news.wait()
        return not self._closed

    def reading(self) -> Reader:
        """A place for one reader, for a `with` block; `Overloaded` if there is none."""
        if self._readers >= MAX_READERS:
            raise Overloaded(
                f"{MAX_READERS} streams of /admin/api/stream are open, which is the most; close "
                "one, or ask for what it shows by itself.",
                retry_after_s=5,
                numbers={"reason": "streams", "open": self._readers},
            )
        return Reader(self)

    def close(self) -> None:
        """Nothing more will come."""
        self._closed = True
        self._publish()

    def enter(self) -> None:
        """For readers."""
        self._readers += 1

    def leave(self) -> None:
        """For readers."""
        self._readers -= 1

    def check(self) -> None:
        """What is booked is what is kept."""
        assert self._memory.used_bytes == self._size()
        for log in self._logs.values():
            assert len(log.rows) <= log.most
            assert log.size <= _LOG_BYTES or len(log.rows) == 1

    def _row(self, kind: str, data: bytes) -> Row:
        self._id += 1
        return Row(self._id, kind, _frame(self._id, kind, data))

    def _publish(self) -> None:
        self._book()
        self._news.set()
        self._news = asyncio.Event()

    def _size(self) -> int:
        states = sum(2 * len(row.frame) + _ROW_BYTES for row in self._states.values())
        return states + sum(log.size for log in self._logs.values())

    def _book(self) -> None:
        more = self._size() - self._memory.used_bytes
        if more > 0:
            self._memory.take_now(more)
        else:
            self._memory.give(-more)


class Reader:
    """One reader's place."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast

    def __enter__(self) -> Broadcast:
        self._broadcast.enter()
        return self._broadcast

    def __exit__(self, *_: object) -> None:
        self._broadcast.leave()


def _frame(number: int, kind: str, data: bytes) -> bytes:
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (number, kind.encode(), data)


def _batch_length(rows: list[Row]) -> int:
    """How many of them are sent at once: at least one."""
    size = 0
    for number, row in enumerate(rows):
        size += len(row.frame)
        if number and size > BATCH_BYTES:
            return number
    return len(rows)
