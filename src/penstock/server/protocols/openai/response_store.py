"""Stored responses: one SQLite file, bounded in rows and bytes.

When there are too many the oldest of the owner that has the most go: nobody loses what is within
an equal share to one who stores without end. It keeps JSON by id and knows no protocol. SQLite
blocks, so it has one thread of its own; what is half done when the server ends is found at the next
start and marked as failed.

The disk may be full or read-only, and the file damaged, at the start or later. Then whoever needs
it gets `StoreUnavailable`, and each use tries again, so that it comes back by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from penstock.config.private import FILE, make_folder
from penstock.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Result = TypeVar("Result")

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_CLOSE_S = 5.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    previous TEXT,
    owner TEXT NOT NULL,
    finished INTEGER NOT NULL,
    body BLOB NOT NULL,
    input BLOB NOT NULL,
    number INTEGER UNIQUE
) STRICT
"""
_INDEX = "CREATE INDEX IF NOT EXISTS of_owner ON responses (owner, number)"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response: `body` as it is answered, `input` the items that were its own."""

    id: str
    previous: str | None
    owner: str  # a mark of the API key; those with another do not see it
    finished: bool
    body: bytes
    input: bytes


class ResponseStore:
    """Responses on disk."""

    def __init__(self, file: Path, max_responses: int, max_bytes: int) -> None:
        self._file = file
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._connection: sqlite3.Connection | None = None
        self._held: dict[str, StoredResponse] = {}  # states that the disk did not take yet
        self._trouble: StoreUnavailable | None = None
        self._cannot_write = False  # what the trouble is
        # Told why it cannot be used, when that begins, and None when it can again.
        self.on_change: Callable[[StoreUnavailable | None], None] = lambda _: None

    async def put(self, response: StoredResponse) -> None:
        """Store it, or its newer state; the oldest of the owner with the most make room."""
        await self._run(partial(self._put, response=response), writes=True)
        self._held.pop(response.id, None)
        with contextlib.suppress(StoreUnavailable):
            for held in list(self._held.values()):
                await self._run(partial(self._put, response=held), writes=True)
                self._held.pop(held.id, None)

    def hold(self, response: StoredResponse) -> None:
        """Remember the newer state of a stored response until the disk takes it. What is held is
        small, and of one that is known."""
        self._held[response.id] = response

    async def get(self, response_id: str, owner: str) -> StoredResponse | None:
        """The response of that id; None when there is none, or it is another's."""
        if (held := self._held_for(response_id, owner)) is not None:
            return held
        return await self._run(lambda database: _get(database, response_id, owner))

    async def length(self, response_id: str, owner: str, most: int = 1) -> int | None:
        """Bytes of a response and, up to `most`, of those it continues, none of which are read;
        None when there is none, or it is another's."""
        if most == 1 and (held := self._held_for(response_id, owner)) is not None:
            return len(held.body) + len(held.input)
        return await self._run(lambda database: _length(database, response_id, owner, most))

    async def chain(self, response_id: str, owner: str, most: int) -> list[StoredResponse] | None:
        """A response and those it continues, the first first; None when one is missing."""
        chain = await self._run(lambda database: _chain(database, response_id, owner, most))
        if chain is None or not self._held:
            return chain
        return [
            replace(each, body=held.body) if (held := self._held.get(each.id)) else each
            for each in chain
        ]

    async def delete(self, response_id: str, owner: str) -> bool:
        """Remove it; whether it was there."""

        def run(database: sqlite3.Connection) -> bool:
            with database:
                found = database.execute(
                    "DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
                )
            return found.rowcount > 0

        held = self._held_for(response_id, owner) is not None
        found = await self._run(run, writes=True) or held
        if held:
            self._held.pop(response_id, None)
        return found

    async def unfinished(self) -> list[StoredResponse]:
        """Those that a server which has ended left behind."""
        return await self._run(
            lambda database: [
                _row(row)
                for row in database.execute(
                    "SELECT id, previous, owner, finished, body, input FROM responses "
                    "WHERE finished = 0"
                )
            ]
        )

    async def close(self) -> None:
        """Close the file."""

        def run(database: sqlite3.Connection) -> None:
            database.close()
            self._connection = None

        if self._connection is not None:
            with contextlib.suppress(StoreUnavailable, TimeoutError):
                await asyncio.wait_for(self._run(run), _CLOSE_S)  # a disk may never answer
        self._thread.shutdown(wait=False)

    def _held_for(self, response_id: str, owner: str) -> StoredResponse | None:
        held = self._held.get(response_id)
        return held if held is not None and held.owner == owner else None

    async def _run(
        self, work: Callable[[sqlite3.Connection], Result], *, writes: bool = False
    ) -> Result:
        loop = asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(self._thread, self._attempt, work)
        except StoreUnavailable as error:
            if self._trouble is None or self._trouble.message != error.message:
                self.on_change(error)
            self._trouble, self._cannot_write = error, writes
            raise
        # That something can be read says nothing about writing.
        if self._trouble is not None and (writes or not self._cannot_write):
            self._trouble = None
            self.on_change(None)
        return result

    def _attempt(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        try:
            return work(self._open())
        except (sqlite3.Error, OSError) as error:
            if not _is_full(error):  # with a full disk, what is there can still be read
                self._drop()
            raise StoreUnavailable(_sentence(error, self._file)) from error

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            make_folder(self._file.parent)
            # Conversations are nobody else's business, from the first byte on: SQLite gives the
            # files beside this one the mode that it has.
            os.close(os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE))
            for path in self._file.parent.glob(f"{self._file.name}*"):
                path.chmod(FILE)
            connection = sqlite3.connect(self._file, isolation_level="IMMEDIATE", timeout=10)
            try:
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.execute(_SCHEMA)
                connection.execute(_INDEX)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _put(self, database: sqlite3.Connection, response: StoredResponse) -> None:
        with database:
            database.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?,"
                " (SELECT coalesce(max(number), 0) + 1 FROM responses))"
                " ON CONFLICT (id) DO UPDATE SET finished = excluded.finished,"
                " body = excluded.body",
                (
                    response.id,
                    response.previous,
                    response.owner,
                    int(response.finished),
                    response.body,
                    response.input,
                ),
            )
            _make_room(database, self._max_responses, self._max_bytes)
        with contextlib.suppress(sqlite3.OperationalError):  # it is stored all the same
            database.execute("PRAGMA incremental_vacuum(64)").fetchall()


def _make_room(database: sqlite3.Connection, max_responses: int, max_bytes: int) -> None:
    """Until all is within both bounds: delete the oldest of whom has the most of what is over."""
    held = {
        owner: (count, size)
        for owner, count, size in database.execute(
            "SELECT owner, count(*), sum(length(body) + length(input)) FROM responses"
            " GROUP BY owner"
        )
    }
    for bound, most in enumerate((max_responses, max_bytes)):
        while sum(of[bound] for of in held.values()) > most:
            owner = max(held, key=lambda one: held[one][bound])
            number, size = database.execute(
                "SELECT number, length(body) + length(input) FROM responses WHERE owner = ?"
                " ORDER BY number LIMIT 1",
                (owner,),
            ).fetchone()
            database.execute("DELETE FROM responses WHERE number = ?", (number,))
            held[owner] = held[owner][0] - 1, held[owner][1] - size


def _get(database: sqlite3.Connection, response_id: str, owner: str) -> StoredResponse | None:
    row = database.execute(
        "SELECT id, previous, owner, finished, body, input FROM responses"
        " WHERE id = ? AND owner = ?",
        (response_id, owner),
    ).fetchone()
    return None if row is None else _row(row)


def _length(database: sqlite3.Connection, response_id: str, owner: str, most: int) -> int | None:
    (size,) = database.execute(
        "WITH RECURSIVE chain (previous, size, place) AS ("
        " SELECT previous, length(body) + length(input), 1 FROM responses"
        " WHERE id = :id AND owner = :owner"
        " UNION ALL"
        " SELECT found.previous, length(found.body) + length(found.input), place + 1"
        " FROM chain JOIN responses AS found ON found.id = chain.previous"
        " WHERE found.owner = :owner AND place < :most)"
        " SELECT sum(size) FROM chain",
        {"id": response_id, "owner": owner, "most": most},
    ).fetchone()
    return None if size is None else int(size)


def _chain(
    database: sqlite3.Connection, response_id: str, owner: str, most: int
) -> list[StoredResponse] | None:
    chain: list[StoredResponse] = []
    wanted: str | None = response_id
    while wanted is not None and len(chain) < most:
        found = _get(database, wanted, owner)
        if found is None:
            return None
        chain.append(found)
        wanted = found.previous
    return chain[::-1]


def _row(row: tuple[str, str | None, str, int, bytes, bytes]) -> StoredResponse:
    return StoredResponse(row[0], row[1], row[2], bool(row[3]), row[4], row[5])


def _is_full(error: sqlite3.Error | OSError) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return _code(error) == sqlite3.SQLITE_FULL


def _code(error: sqlite3.Error) -> int:
    """SQLite's own code, without what it adds in its higher bits."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _sentence(error: sqlite3.Error | OSError, file: Path) -> str:
    """What is wrong and what to do; it works again as soon as that is done."""
    if _is_full(error):
        return f"Responses cannot be stored: the disk of {file} is full; free some space on it."
    if isinstance(error, sqlite3.Error) and _code(error) in _DAMAGED:
        return (
            f"Stored responses cannot be used: {file} is damaged ({error}). Move it away, and the "
            f"{file.name}-wal beside it; a new one is begun with the next response."
        )
    why = error.strerror if isinstance(error, OSError) else str(error)
    return f"Stored responses cannot be used: {file}: {why}. The folder must be writable."
