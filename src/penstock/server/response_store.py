"""Stored responses: one SQLite file, bounded in rows and bytes, the oldest go first.

It keeps JSON by id and knows no protocol. SQLite blocks, so it has one thread of its own; what is
half done when the server ends is found at the next start and marked as failed.
"""

from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Result = TypeVar("Result")

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

    def __init__(self, file: Path, most: int, most_bytes: int) -> None:
        self._file = file
        self._most = most
        self._most_bytes = most_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._connection: sqlite3.Connection | None = None

    async def put(self, response: StoredResponse) -> None:
        """Store it, or its newer state; the oldest make room."""
        await self._run(lambda database: self._put(database, response))

    async def get(self, response_id: str, owner: str) -> StoredResponse | None:
        """The response of that id; None when there is none, or it is another's."""
        return await self._run(lambda database: _get(database, response_id, owner))

    async def length(self, response_id: str, owner: str, most: int = 1) -> int | None:
        """Bytes of a response and, up to `most`, of those it continues, none of which are read;
        None when there is none, or it is another's."""
        return await self._run(lambda database: _length(database, response_id, owner, most))

    async def chain(self, response_id: str, owner: str, most: int) -> list[StoredResponse] | None:
        """A response and those it continues, the first first; None when one is missing."""
        return await self._run(lambda database: _chain(database, response_id, owner, most))

    async def delete(self, response_id: str, owner: str) -> bool:
        """Remove it; whether it was there."""

        def run(database: sqlite3.Connection) -> bool:
            with database:
                found = database.execute(
                    "DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
                )
            return found.rowcount > 0

        return await self._run(run)

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
            await self._run(run)
        self._thread.shutdown()

    async def _run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: work(self._open()))

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self._file, isolation_level="IMMEDIATE", timeout=10)
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(_SCHEMA)
            self._file.chmod(0o600)  # conversations are nobody else's business
            self._connection = connection
        return self._connection

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
            # Keep the newest that fit both bounds.
            database.execute(
                "DELETE FROM responses WHERE number <= (SELECT max(number) FROM ("
                " SELECT number, count(*) OVER newest AS place,"
                " sum(length(body) + length(input)) OVER newest AS size FROM responses"
                " WINDOW newest AS (ORDER BY number DESC)) WHERE place > ? OR size > ?)",
                (self._most, self._most_bytes),
            )
        database.execute("PRAGMA incremental_vacuum(64)").fetchall()


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
