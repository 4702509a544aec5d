"""Leases over real worker processes with a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from penstock.catalog import Catalog
from penstock.config import ModelSettings, ModelsSettings
from penstock.errors import ModelTooLarge, Overloaded, PenstockError, UnknownModel, WorkerLost
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger, Purpose
from penstock.memory.limits import GIB, MIB
from penstock.server.processes.fork_launcher import ForkLauncher
from penstock.server.processes.supervisor import Supervisor
from penstock.server.residency import model as module
from penstock.server.residency import residency as residency_module
from penstock.server.residency.load_estimate import Storage
from penstock.server.residency.residency import Residency
from penstock.testing.fake_worker import FAKE_PRELOAD, FakeModel, lives
from penstock.wire import Sampling, Submit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from pathlib import Path

    from penstock.server.processes.worker_client import ModelClient

SHAPE = "random:tiny-llama"
PATIENCE_S = 30.0
LIMIT = 480 * MIB


class Server:
    """A residency with its supervisor, over fake models in `models/`."""

    def __init__(self, home: Path, limit: int, settings: ModelsSettings | None) -> None:
        self.models = home / "models"
        self.models.mkdir()
        self.catalog = Catalog([self.models])
        self.supervisor = Supervisor(
            home,
            ForkLauncher(home, engine_module="penstock.testing.fake_worker", preload=FAKE_PRELOAD),
        )
        self.ledger = Ledger({RAM: limit})
        self.residency = Residency(
            self.catalog,
            self.supervisor,
            self.ledger,
            settings or ModelsSettings(device="cpu"),
            storage=Storage(home / "profiles"),
            patience_s=PATIENCE_S,
        )

    def add(self, name: str, behaviour: FakeModel | None = None) -> Path:
        """A model folder of that name."""
        folder = self.models / name
        if not folder.exists():
            shutil.copytree(self.catalog.make(SHAPE).path, folder)
        return (behaviour or FakeModel()).write(folder)

    def row(self, name: str) -> dict[str, Any]:
        return next(row for row in self.residency.snapshot() if row["name"] == name)


def serve(
    tmp_path: Path,
    scenario: Callable[[Server], Coroutine[Any, Any, None]],
    limit: int = 64 * GIB,
    settings: ModelsSettings | None = None,
) -> None:
    async def body() -> None:
        server = Server(tmp_path, limit, settings)
        try:
            await scenario(server)
        finally:
            await server.residency.close()
            await server.supervisor.close()
        server.ledger.check()
        # Every byte of every model is back, however its life went.
        assert set(server.ledger.snapshot()[RAM].owners) <= {"fork server"}

    asyncio.run(body())


async def answer(client: ModelClient, count: int = 3) -> list[int]:
    request = Submit(id=0, prompt=[8, 9], max_tokens=count, sampling=Sampling())
    async with client.generate(request) as outputs:
        return [token async for output in outputs for token in output.tokens]


async def loading_begins(folder: Path) -> None:
    async with asyncio.timeout(20):
        while not lives(folder):  # noqa: ASYNC110 - another process makes the mark
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def held(server: Server, name: str) -> AsyncIterator[asyncio.Event]:
    """A lease held by another task until the event is set."""
    release, taken = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with server.residency.lease(name):
            taken.set()
            await release.wait()

    task = asyncio.create_task(hold())
    await taken.wait()
    try:
        yield release
    finally:
        release.set()
        await task


def test_a_burst_of_leases_is_one_load(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        folder = server.add("m", FakeModel(load_s=0.05))

        async def one() -> int:
            async with server.residency.lease("m") as (card, client):
                assert card.name == "m"
                assert await answer(client) == [8, 9, 8]
                return client.ready.pid

        pids = await asyncio.gather(*(one() for _ in range(30)))
        assert len(set(pids)) == 1
        assert lives(folder) == 1
        row = server.row("m")
        assert (row["state"], row["pid"], row["leases"]) == ("ready", pids[0], 0)
        assert row["bytes"] > 0

    serve(tmp_path, scenario)


def test_a_waiter_that_leaves_does_not_stop_the_load(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        folder = server.add("m", FakeModel(load_s=0.1))

        async def one() -> None:
            async with server.residency.lease("m"):
                pass

        leaver = asyncio.create_task(one())
        await loading_begins(folder)
        leaver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaver
        await one()
        assert lives(folder) == 1

    serve(tmp_path, scenario)


def test_a_dead_worker_is_replaced_at_the_next_lease(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        folder = server.add("m")
        async with server.residency.lease("m") as (_, client):
            os.kill(client.ready.pid, signal.SIGKILL)
            with pytest.raises(WorkerLost):
                await answer(client, 1 << 30)
            # The retry of the same request, while it still holds its first lease.
            async with server.residency.lease("m") as (_, again):
                assert again.ready.pid != client.ready.pid
                assert await answer(again) == [8, 9, 8]
        assert lives(folder) == 2

    serve(tmp_path, scenario)


def test_the_third_death_makes_the_model_fail_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DEATH_PAUSE_S", 0.01)

    async def scenario(server: Server) -> None:
        folder = server.add("bad", FakeModel(load_death=True))
        server.add("good")
        for _ in range(2):
            with pytest.raises(WorkerLost, match="3 times") as caught:
                async with server.residency.lease("bad"):
                    pass
            assert caught.value.retry_after_s is not None
            assert 200 < caught.value.retry_after_s <= module.DEATH_WINDOW_S
        assert lives(folder) == 3
        row = server.row("bad")
        assert (row["state"], row["pid"], row["bytes"]) == ("failed", None, 0)
        assert "SIGKILL" in row["reason"]
        async with server.residency.lease("good") as (_, client):
            assert await answer(client) == [8, 9, 8]

    serve(tmp_path, scenario)


def test_deaths_during_a_load_are_retried_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DEATH_PAUSE_S", 0.01)

    async def scenario(server: Server) -> None:
        folder = server.add("m", FakeModel(load_death=True, bad_lives=2))
        async with server.residency.lease("m") as (_, client):
            assert await answer(client) == [8, 9, 8]
        assert lives(folder) == 3

    serve(tmp_path, scenario)


def test_a_refused_load_is_told_to_all_and_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFUSAL_PAUSE_S", 3600.0)
    monkeypatch.setattr(module, "REFUSAL_PAUSE_MAX_S", 3600.0)

    async def scenario(server: Server) -> None:
        refused = FakeModel(load_error_code=Overloaded.code, bad_lives=1)
        folder = server.add("m", refused)

        async def one() -> None:
            async with server.residency.lease("m"):
                pass

        errors = await asyncio.gather(*(one() for _ in range(5)), return_exceptions=True)
        assert all(isinstance(error, Overloaded) for error in errors)
        assert len({id(error) for error in errors}) == 5
        with pytest.raises(Overloaded, match="refuses to load"):
            await one()
        assert lives(folder) == 1
        assert server.row("m")["state"] == "failed"
        # Only the residency's clock: event loops of other servers go by the real one.
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 7200)
        for with_clock in (module, residency_module):
            monkeypatch.setattr(with_clock, "time", later)
        await one()
        assert lives(folder) == 2
        assert server.row("m")["state"] == "ready"

    serve(tmp_path, scenario)


def test_an_unload_waits_for_leases_and_new_ones_load_again(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        folder = server.add("m")
        assert await server.residency.unload("m") is False
        async with held(server, "m") as release:
            pid = server.row("m")["pid"]
            unload = asyncio.create_task(server.residency.unload("m"))
            await asyncio.sleep(0)
            assert (server.row("m")["state"], server.row("m")["leases"]) == ("draining", 1)

            async def late() -> int:
                async with server.residency.lease("m") as (_, client):
                    return client.ready.pid

            later = asyncio.create_task(late())
            await asyncio.sleep(0.01)
            assert not unload.done()
            assert not later.done()
            release.set()
            assert await unload is True
            assert await later != pid
        assert lives(folder) == 2
        assert await server.residency.unload("m") is True
        assert (server.row("m")["state"], server.row("m")["bytes"]) == ("absent", 0)

    serve(tmp_path, scenario)


def kv_of(server: Server, name: str) -> int:
    kv: int = server.row(name)["kv_bytes"]
    return kv


def test_a_second_model_takes_unused_kv_of_the_first(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        # A tiny window would need almost nothing: KV for hundreds of windows is of no use.
        server.add("a")
        server.add("b")
        async with server.residency.lease("a") as (_, client):
            await answer(client)
        alone = kv_of(server, "a")
        async with server.residency.lease("b"), server.residency.lease("a") as (_, again):
            assert again is client  # it was not unloaded
            assert kv_of(server, "a") < alone
            assert kv_of(server, "b") >= 32 * 1024
            server.ledger.check()
            booked = server.ledger.snapshot()[RAM].booked_bytes
            assert booked <= LIMIT
        await server.residency.unload("b")
        assert kv_of(server, "a") == alone  # and has it back

    serve(tmp_path, scenario, limit=LIMIT)


def test_an_idle_model_goes_for_one_that_needs_its_room(tmp_path: Path) -> None:
    settings = ModelsSettings(device="cpu", kv_bytes=GIB // 2)

    async def scenario(server: Server) -> None:
        first, _, third = (server.add(name) for name in "abc")
        for name in "ab":
            async with server.residency.lease(name):
                pass
        assert [server.row(n)["state"] for n in "ab"] == ["ready", "ready"]
        async with server.residency.lease("c"):
            # The longest unused went, and only that.
            assert [server.row(n)["state"] for n in "abc"] == ["absent", "ready", "ready"]
            server.ledger.check()
        assert (lives(first), lives(third)) == (1, 1)

    serve(tmp_path, scenario, limit=1800 * MIB, settings=settings)


def test_a_load_waits_for_a_leased_model_and_for_its_turn(tmp_path: Path) -> None:
    settings = ModelsSettings(device="cpu", kv_bytes=GIB)

    async def scenario(server: Server) -> None:
        for name in "abc":
            server.add(name)
        order: list[str] = []

        async def use(name: str) -> None:
            async with server.residency.lease(name):
                order.append(name)

        async with held(server, "a") as release:
            second = asyncio.create_task(use("b"))
            await asyncio.sleep(0.05)
            third = asyncio.create_task(use("c"))
            await asyncio.sleep(0.2)
            assert order == []
            release.set()
            await asyncio.gather(second, third)
        assert order == ["b", "c"]

    serve(tmp_path, scenario, limit=2 * GIB, settings=settings)


def test_a_pinned_model_stays_and_its_neighbour_is_refused_with_numbers(tmp_path: Path) -> None:
    pinned = ModelSettings(device="cpu", kv_bytes=GIB, pinned=True)
    settings = ModelsSettings(device="cpu", kv_bytes=GIB, named={"a": pinned})

    async def scenario(server: Server) -> None:
        server.add("a")
        folder = server.add("b")
        async with server.residency.lease("a"):
            pass
        with pytest.raises(ModelTooLarge, match=r"memory\.limit") as caught:
            async with server.residency.lease("b"):
                pass
        assert caught.value.numbers is not None
        assert caught.value.numbers["needed_bytes"] > caught.value.numbers["limit_bytes"]
        assert lives(folder) == 0
        await server.residency.unload("a")  # by the user's own wish
        async with server.residency.lease("b"):
            pass

    serve(tmp_path, scenario, limit=2 * GIB, settings=settings)


def test_a_model_that_is_alone_too_large_is_refused_before_a_process_is_made(
    tmp_path: Path,
) -> None:
    async def scenario(server: Server) -> None:
        folder = server.add("a")
        with pytest.raises(ModelTooLarge, match="does not fit into ram"):
            async with server.residency.lease("a"):
                pass
        assert lives(folder) == 0

    serve(tmp_path, scenario, limit=200 * MIB)


def test_bytes_of_an_unload_settle_until_the_process_is_reaped(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        server.add("m", FakeModel(step_s=0.3))
        async with server.residency.lease("m") as (_, client):
            stuck = asyncio.create_task(answer(client, 1))
            await asyncio.sleep(0.05)  # it is in its step, which Shutdown waits for
        held_bytes = server.row("m")["bytes"]
        unload = asyncio.create_task(server.residency.unload("m"))
        await asyncio.sleep(0.05)
        owners = server.ledger.snapshot()[RAM].owners
        assert owners["model:m"] == {Purpose.EXITING: held_bytes}
        assert await unload is True
        assert "model:m" not in server.ledger.snapshot()[RAM].owners
        await asyncio.gather(stuck, return_exceptions=True)

    serve(tmp_path, scenario)


def test_settings_of_a_model_reach_its_worker(tmp_path: Path) -> None:
    settings = ModelsSettings(
        device="cpu", named={"m": ModelSettings(device="cpu", max_context=100, kv_bytes=4 << 20)}
    )

    async def scenario(server: Server) -> None:
        server.add("m")
        async with server.residency.lease("m") as (_, client):
            assert client.ready.context == 100
            assert client.ready.kv_tokens * 1024 <= 4 << 20

    serve(tmp_path, scenario, settings=settings)


def test_an_unknown_model_leaves_no_trace(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        with pytest.raises(UnknownModel):
            async with server.residency.lease("nobody"):
                pass
        assert server.residency.snapshot() == []

    serve(tmp_path, scenario)


def test_closing_ends_loads_and_streams(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        slow = server.add("slow", FakeModel(load_s=3600))
        server.add("busy", FakeModel(step_s=0.001))

        async def use(name: str) -> None:
            async with server.residency.lease(name) as (_, client):
                await answer(client, 1 << 30)

        loading = asyncio.create_task(use("slow"))
        streaming = asyncio.create_task(use("busy"))
        await loading_begins(slow)
        async with held(server, "busy"):
            pass  # so it is loaded, and the stream has its lease
        await server.residency.close()
        with pytest.raises(WorkerLost, match="unloaded"):
            await streaming
        with pytest.raises(Overloaded, match="shutting down"):
            await loading

    serve(tmp_path, scenario)


def test_an_unload_cancels_a_load_and_who_waited_is_told(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        folder = server.add("m", FakeModel(load_s=3600))

        async def one() -> None:
            async with server.residency.lease("m"):
                pass

        waiters = [asyncio.create_task(one()) for _ in range(3)]
        await loading_begins(folder)
        before = set(server.ledger.snapshot()[RAM].owners)
        assert await server.residency.unload("m") is True
        told = await asyncio.gather(*waiters, return_exceptions=True)
        assert all(isinstance(error, Overloaded) for error in told), told
        assert "was cancelled" in str(told[0])
        assert before - set(server.ledger.snapshot()[RAM].owners) == {"model:m"}
        assert (server.row("m")["state"], server.row("m")["pid"]) == ("absent", None)
        server.add("m", FakeModel())
        await one()  # it is no reason to refuse the next
        assert lives(folder) == 2

    serve(tmp_path, scenario)


def test_a_load_that_waits_for_room_ends_with_the_last_who_wants_it(tmp_path: Path) -> None:
    settings = ModelsSettings(device="cpu", kv_bytes=GIB)

    async def scenario(server: Server) -> None:
        server.add("a")
        folder = server.add("b")

        async def use(name: str) -> None:
            async with server.residency.lease(name):
                pass

        async with held(server, "a"):
            wanted = asyncio.create_task(use("b"))
            # `a` serves for as long as its load took, then it takes no more requests.
            async with asyncio.timeout(30):
                behind = asyncio.create_task(use("a"))
                while (await asyncio.wait({behind}, timeout=0.7))[0]:
                    behind = asyncio.create_task(use("a"))
            wanted.cancel()
            async with asyncio.timeout(5):
                await behind  # `a` is still held, and serves again
            assert server.row("b")["state"] == "absent"
        assert lives(folder) == 0

    serve(tmp_path, scenario, limit=2 * GIB, settings=settings)


def test_a_model_that_is_always_busy_makes_room_in_the_end(tmp_path: Path) -> None:
    settings = ModelsSettings(device="cpu", kv_bytes=GIB)

    async def scenario(server: Server) -> None:
        server.add("a")
        server.add("b")
        served: list[str] = []

        async def stream() -> None:
            """Requests to `a` that overlap: there is never a moment without one."""
            while "b" not in served:
                async with server.residency.lease("a"):
                    served.append("a")
                    begun.set()
                    await asyncio.sleep(0.05)

        async def other() -> None:
            async with server.residency.lease("b"):
                served.append("b")

        begun = asyncio.Event()
        streams = [asyncio.create_task(stream())]
        await begun.wait()
        streams.append(asyncio.create_task(stream()))
        async with asyncio.timeout(20):
            await other()
            await asyncio.gather(*streams)
        kinds = [(row["event"], row["model"]) for row in server.residency.events.rows()]
        assert kinds[:5] == [
            ("load", "a"), ("loaded", "a"), ("unload", "a"), ("load", "b"), ("loaded", "b"),
        ]  # fmt: skip

    serve(tmp_path, scenario, limit=2 * GIB, settings=settings)


def test_a_repaired_model_is_tried_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFUSAL_PAUSE_S", 3600.0)
    monkeypatch.setattr(module, "REFUSAL_PAUSE_MAX_S", 3600.0)

    async def scenario(server: Server) -> None:
        folder = server.add("m", FakeModel(load_error_code="invalid_request_error"))
        for _ in range(2):
            with pytest.raises(PenstockError, match="refuses to load"):
                async with server.residency.lease("m"):
                    pass
        assert lives(folder) == 1
        server.add("m", FakeModel())
        async with server.residency.lease("m") as (_, client):
            assert await answer(client) == [8, 9, 8]

    serve(tmp_path, scenario)
