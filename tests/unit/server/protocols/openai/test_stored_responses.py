"""Stored responses in memory: booked before they are read, decoded apart, given back; and what the
background holds when its beginning fails."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from penstock.errors import BadRequest, BodyTooLarge, Overloaded, UnknownResponse
from penstock.memory.clients.json_weight import BODY_FACTOR
from penstock.memory.clients.requests import RequestPool
from penstock.memory.domains import RAM
from penstock.memory.events import Events
from penstock.memory.ledger import Ledger
from penstock.server.protocols.openai import responses
from penstock.server.protocols.openai import stored_responses as stored
from penstock.server.protocols.openai.response_store import ResponseStore, StoredResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from penstock.server.http.exchange import Exchange

MIB = 1 << 20
LARGE = "x" * MIB


@dataclass
class Bench:
    """A store, a pool, and what of it was booked whenever bytes came from the store."""

    store: ResponseStore
    pool: RequestPool
    booked: list[int] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)

    def exchange(self, response_id: str = "", owner: str = "me") -> Exchange:
        async def send_bytes(content: bytes, media_type: str) -> None:
            self.sent.append(content)

        return cast(
            "Exchange",
            SimpleNamespace(
                path_params={"id": response_id},
                owner=owner,
                caller="key 1",
                client="key 1",
                salt=b"",
                trace="",
                memory=self.pool.request_memory(),
                send_bytes=send_bytes,
            ),
        )

    async def put(self, response_id: str, previous: str | None = None, text: str = "hi") -> int:
        """Store a finished response; its bytes."""
        body = msgspec.json.encode({"status": "completed", "background": False, "output": []})
        asked = msgspec.json.encode([{"role": "user", "content": text}])
        await self.store.put(StoredResponse(response_id, previous, "me", True, body, asked))
        return len(body) + len(asked)


@asynccontextmanager
async def bench(folder: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> AsyncIterator[Bench]:
    pool = RequestPool(Ledger({RAM: 4 * most}), 0, most, patience_s=0.05)
    made = Bench(ResponseStore(folder / "responses.db", 100, 1 << 30), pool)

    def watched(read: Callable[..., Any]) -> Callable[..., Any]:
        async def watch(*arguments: Any) -> Any:
            made.booked.append(pool.used_bytes)
            return await read(*arguments)

        return watch

    for name in ("get", "chain"):
        monkeypatch.setattr(made.store, name, watched(getattr(made.store, name)))
    yield made
    await made.store.close()
    assert pool.used_bytes == 0


def threads_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[bool]:
    """Whether each call of this function was on the event loop's thread."""
    calls: list[bool] = []
    inner = getattr(stored, name)

    def work(*arguments: Any) -> Any:
        calls.append(threading.current_thread() is threading.main_thread())
        return inner(*arguments)

    monkeypatch.setattr(stored, name, work)
    return calls


@pytest.mark.parametrize("text", ["hi", LARGE])
def test_a_chain_is_booked_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    on_the_loop = threads_of(monkeypatch, "_items")

    async def body() -> None:
        async with bench(tmp_path, monkeypatch, 40 * MIB) as here:
            size = await here.put("a", None, text) + await here.put("b", "a", text)
            await here.put("other")
            exchange = here.exchange()
            async with stored.earlier_items(exchange, "b", here.store) as items:
                assert [item.content for item in items] == [text, text]
                assert here.pool.used_bytes >= BODY_FACTOR * size
            assert here.booked == [BODY_FACTOR * size]
            assert exchange.memory.size == 0

    asyncio.run(body())
    assert on_the_loop == [text == "hi"]


def test_a_chain_that_can_never_fit_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with bench(tmp_path, monkeypatch, 9 * MIB) as here:
            await here.put("a", None, LARGE)
            await here.put("b", "a", LARGE)
            with pytest.raises(BodyTooLarge):
                async with stored.earlier_items(here.exchange(), "b", here.store):
                    pass
            assert here.booked == []

    asyncio.run(body())


def test_a_chain_that_is_broken_or_anothers_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with bench(tmp_path, monkeypatch, MIB) as here:
            await here.put("b", "a")
            for exchange, name in ((here.exchange(), "b"), (here.exchange(owner="you"), "b")):
                with pytest.raises(BadRequest, match="previous_response_id"):
                    async with stored.earlier_items(exchange, name, here.store):
                        pass

    asyncio.run(body())


def test_the_length_of_a_chain_is_bounded_like_the_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with bench(tmp_path, monkeypatch, MIB) as here:
            sizes = [await here.put("a"), await here.put("b", "a"), await here.put("c", "b")]
            lengths = [await here.store.length("c", "me", most) for most in (1, 2, 3, 9)]
            assert lengths == [sizes[2], sum(sizes[1:]), sum(sizes), sum(sizes)]
            assert await here.store.length("c", "you", 9) is None
            chain = await here.store.chain("c", "me", 2)
            assert chain is not None
            assert lengths[1] == sum(len(each.body) + len(each.input) for each in chain)

    asyncio.run(body())


@pytest.mark.parametrize("text", ["hi", LARGE])
def test_what_was_asked_is_booked_and_large_pages_are_made_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    on_the_loop = threads_of(monkeypatch, "_page")

    async def body() -> None:
        async with bench(tmp_path, monkeypatch, 40 * MIB) as here:
            size = await here.put("a", None, text)
            await stored.send_input(here.exchange("a"), here.store)
            assert here.booked == [BODY_FACTOR * size]
            [item] = msgspec.json.decode(here.sent[0])["data"]
            assert item["id"] == "a_in_0"
            assert item["content"] == [{"type": "input_text", "text": text}]

    asyncio.run(body())
    assert on_the_loop == [text == "hi"]


def test_a_response_is_booked_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with bench(tmp_path, monkeypatch, 40 * MIB) as here:
            size = await here.put("a")
            await stored.send_stored(here.exchange("a"), here.store)
            assert msgspec.json.decode(here.sent[0])["status"] == "completed"
            assert here.booked[0] >= size
            assert not await stored.is_background(here.exchange("a"), here.store)
            assert here.booked[1] >= size
            with pytest.raises(UnknownResponse):
                await stored.send_stored(here.exchange("a", owner="you"), here.store)
            assert len(here.booked) == 2

    asyncio.run(body())


@dataclass
class Answer:
    """One that is to be made in the background."""

    id: str
    failure: Exception | None = None
    body: dict[str, Any] = field(default_factory=dict)

    async def save(self, *, finished: bool) -> None:
        await asyncio.sleep(0.01)
        if self.failure is not None:
            raise self.failure


def test_a_beginning_that_fails_gives_everything_back_and_the_bound_holds_for_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "_MAX_BACKGROUND", 4)  # of which a client has half
    over = asyncio.Event()

    async def make(origin: Any, services: Any, answer: Any) -> None:
        await over.wait()
        origin.memory.release()

    monkeypatch.setattr(responses, "_make", make)

    async def body() -> None:
        async with bench(tmp_path, monkeypatch, MIB) as here:
            services = cast("Any", SimpleNamespace(requests=here.pool))
            background = responses.Responses(here.store, Events())
            exchange = here.exchange()
            exchange.memory.grow_now(100)

            async def start(answer: Answer) -> None:
                await background.start(exchange, services, cast("Any", answer))

            for _ in range(3):  # more often than there are places
                with pytest.raises(OSError, match="disk"):
                    await start(Answer("resp_full", OSError("the disk is full")))
            assert here.pool.used_bytes == 100
            outcomes = await asyncio.gather(
                *(start(Answer(f"resp_{number}")) for number in range(5)), return_exceptions=True
            )
            assert [type(outcome) for outcome in outcomes] == [type(None)] * 2 + [Overloaded] * 3
            assert here.pool.used_bytes == 300
            over.set()
            await asyncio.sleep(0.01)
            await start(Answer("resp_after"))
            await asyncio.sleep(0.01)
            exchange.memory.release()

    asyncio.run(body())
