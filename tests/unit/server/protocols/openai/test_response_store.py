"""The store on a disk that is full, read-only or damaged: a sentence, and back by itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from penstock.errors import StoreUnavailable
from penstock.memory.events import Events
from penstock.server.protocols.openai.response_store import ResponseStore, StoredResponse
from penstock.server.protocols.openai.responses import Responses

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

LARGE = b'"' + b"x" * (1 << 20) + b'"'


def response(
    name: str, body: bytes = b'{"status":"completed"}', *, ended: bool = True, owner: str = "me"
) -> StoredResponse:
    return StoredResponse(name, None, owner, ended, body, b"[]")


def fill(store: ResponseStore, *, full: bool) -> None:
    """Let the database have no page more, or as many as it wants."""
    assert store._connection is not None
    pages = "1" if full else "1073741823"
    store._thread.submit(store._connection.execute, f"PRAGMA max_page_count = {pages}").result()


def with_store(
    folder: Path, body: Callable[[ResponseStore, list[StoreUnavailable | None]], Awaitable[None]]
) -> None:
    async def run() -> None:
        store = ResponseStore(folder / "home" / "responses.db", 100, 1 << 30)
        changes: list[StoreUnavailable | None] = []
        store.on_change = changes.append
        try:
            await body(store, changes)
        finally:
            await store.close()

    asyncio.run(run())


def test_a_full_disk_is_said_and_what_is_there_can_be_read(tmp_path: Path) -> None:
    async def body(store: ResponseStore, changes: list[StoreUnavailable | None]) -> None:
        await store.put(response("a"))
        fill(store, full=True)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=r"the disk of .*responses\.db is full"):
                await store.put(response("b", LARGE))
        assert await store.get("a", "me") == response("a")
        assert await store.get("b", "me") is None
        assert len(changes) == 1, "said once, and reading does not mend it"
        fill(store, full=False)
        await store.put(response("b", LARGE))
        assert changes[1:] == [None]

    with_store(tmp_path, body)


def test_a_state_that_the_disk_did_not_take_is_remembered(tmp_path: Path) -> None:
    failed = response("a", b'{"status":"failed"}')

    async def body(store: ResponseStore, changes: list[StoreUnavailable | None]) -> None:
        await store.put(response("a", b'{"status":"in_progress"}', ended=False))
        fill(store, full=True)
        with pytest.raises(StoreUnavailable):
            await store.put(response("a", LARGE))
        store.hold(failed)
        assert await store.get("a", "me") == failed
        assert await store.get("a", "another") is None
        chain = await store.chain("a", "me", 10)
        assert chain is not None and chain[0].body == failed.body
        fill(store, full=False)
        await store.put(response("b"))
        assert not store._held
        assert await store.get("a", "me") == failed

    with_store(tmp_path, body)


def test_a_damaged_file_is_said_and_a_new_one_begun_when_it_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "home" / "responses.db"
    file.parent.mkdir()
    file.write_bytes(b"not a database, whatever its name says " * 100)

    async def body(store: ResponseStore, changes: list[StoreUnavailable | None]) -> None:
        for work in (store.unfinished(), store.get("a", "me"), store.put(response("a"))):
            with pytest.raises(StoreUnavailable, match=r"is damaged .* Move it away"):
                await work
        file.unlink()
        await store.put(response("a"))
        assert changes[-1] is None

    with_store(tmp_path, body)


def test_a_file_that_is_damaged_later(tmp_path: Path) -> None:
    async def body(store: ResponseStore, changes: list[StoreUnavailable | None]) -> None:
        file = tmp_path / "home" / "responses.db"
        for number in range(20):
            await store.put(response(f"r{number}", LARGE))
        store._thread.submit(store._drop).result()  # so that all is in the file
        size = file.stat().st_size
        with file.open("r+b") as damaged:
            damaged.seek(4096)
            damaged.write(b"\xff" * (size - 4096))
        with pytest.raises(StoreUnavailable, match="is damaged"):
            await store.put(response("b"))
        with pytest.raises(StoreUnavailable, match="is damaged"):
            await store.chain("r3", "me", 10)

    with_store(tmp_path, body)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")

    async def body(store: ResponseStore, changes: list[StoreUnavailable | None]) -> None:
        with pytest.raises(StoreUnavailable, match="must be writable"):
            await store.unfinished()

    with_store(tmp_path, body)


def test_its_files_are_private_from_the_first_byte(tmp_path: Path) -> None:
    async def body(store: ResponseStore, changes: list[StoreUnavailable | None]) -> None:
        await store.put(response("a"))
        modes = {path.name: path.stat().st_mode & 0o777 for path in store._file.parent.iterdir()}
        assert set(modes) == {"responses.db", "responses.db-wal", "responses.db-shm"}
        assert set(modes.values()) == {0o600}
        assert store._file.parent.stat().st_mode & 0o777 == 0o700

    with_store(tmp_path, body)


def test_what_an_earlier_server_left_is_failed_once_the_store_is_back(tmp_path: Path) -> None:
    async def body(store: ResponseStore, changes: list[StoreUnavailable | None]) -> None:
        events = Events()
        responses = Responses(store, events)
        await store.put(response("old", b'{"status":"queued"}', ended=False))
        store._thread.submit(store._drop).result()
        aside = store._file.rename(store._file.with_name("aside"))
        store._file.write_text("rubbish " * 1000)
        await responses.recover()
        assert [row["event"] for row in events.rows()] == ["responses not stored"]
        aside.rename(store._file)
        await store.put(response("new", LARGE))
        assert responses._recovery is not None
        await responses._recovery
        stored = await store.get("old", "me")
        assert stored is not None and b'"failed"' in stored.body
        assert [row["event"] for row in events.rows()][-1] == "responses stored again"

    with_store(tmp_path, body)


def kept(folder: Path, most: int, max_bytes: int, stored: list[StoredResponse]) -> list[str]:
    """Those of them that are there when all were stored."""

    async def run() -> list[str]:
        store = ResponseStore(folder / "responses.db", most, max_bytes)
        for one in stored:
            await store.put(one)
        found = [one.id for one in stored if await store.get(one.id, one.owner)]
        await store.close()
        return found

    return asyncio.run(run())


def test_who_stores_without_end_loses_its_own(tmp_path: Path) -> None:
    mine = [response(f"mine {number}") for number in range(4)]
    flood = [response(f"theirs {number}", owner="other") for number in range(50)]
    found = kept(tmp_path, 10, 1 << 30, [*mine, *flood])
    assert found == [*(one.id for one in mine), *(one.id for one in flood[-6:])]


def test_who_stores_large_ones_loses_its_own(tmp_path: Path) -> None:
    mine = [response(f"mine {number}", b"x" * 1000) for number in range(4)]
    flood = [response(f"theirs {number}", b"x" * 3000, owner="other") for number in range(9)]
    found = kept(tmp_path, 100, 11_000, [*mine, *flood])
    assert found == [*(one.id for one in mine), "theirs 7", "theirs 8"]


def test_a_newer_state_that_is_too_large_costs_nobody_else(tmp_path: Path) -> None:
    mine, theirs = response("mine"), response("theirs", owner="other")
    grown = response("theirs", b"x" * 20_000, owner="other")
    assert kept(tmp_path, 100, 10_000, [mine, theirs, grown]) == ["mine"]


def test_of_one_owner_the_newest_are_kept(tmp_path: Path) -> None:
    stored = [response(f"{number}") for number in range(9)]
    assert kept(tmp_path, 3, 1 << 30, stored) == ["6", "7", "8"]
