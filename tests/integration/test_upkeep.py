"""Idle models over real processes: past their time they go, for new settings they load anew."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.catalog import Catalog
from penstock.config import ModelSettings, ModelsSettings
from penstock.memory.ledger import Ledger
from penstock.memory.limits import GIB
from penstock.server.plans import Storage
from penstock.server.residency import Residency
from penstock.server.supervisor import Supervisor
from penstock.server.upkeep import Upkeep
from penstock.testing.fake_server import add_model
from penstock.testing.fake_worker import FAKE_PRELOAD, FakeModel, lives

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from penstock.memory.events import Events

NOW = 1e-9  # of a ttl: any idleness is too long


def serve(
    home: Path,
    scenario: Callable[[Residency, Upkeep, Events], Coroutine[None, None, None]],
    **named: ModelSettings,
) -> None:
    async def body() -> None:
        supervisor = Supervisor(
            home, engine_module="penstock.testing.fake_worker", preload=FAKE_PRELOAD
        )
        ledger = Ledger({"ram": 64 * GIB})
        residency = Residency(
            Catalog([home / "models"]),
            supervisor,
            ledger,
            ModelsSettings(device="cpu", named=named),
            storage=Storage(home / "profiles"),
        )
        try:
            await scenario(residency, Upkeep(residency, residency.events), residency.events)
        finally:
            await residency.close()
            await supervisor.close()
        ledger.check()
        assert set(ledger.snapshot()["ram"].owners) <= {"template"}

    asyncio.run(body())


def told(events: Events, kind: str) -> list[dict[str, object]]:
    return [row for row in events.rows() if row["event"] == kind]


def state(residency: Residency, name: str) -> object:
    return next(row["state"] for row in residency.snapshot() if row["name"] == name)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - processes end and begin meanwhile
            await asyncio.sleep(0.005)


def test_idle_models_go_when_their_time_is_up(tmp_path: Path) -> None:
    for name in ("brief", "pinned", "lasting", "leased"):
        add_model(tmp_path, name)

    async def scenario(residency: Residency, upkeep: Upkeep, events: Events) -> None:
        for name in ("brief", "pinned", "lasting"):
            await residency.load(name)
        async with residency.lease("leased"):
            upkeep.turn()
            upkeep.turn()  # what is on its way is not begun again
            await until(lambda: state(residency, "brief") == "absent")
            await until(lambda: bool(told(events, "unload")))
            [row] = told(events, "unload")
            assert (row["model"], row["reason"]) == ("brief", "ttl")
            await residency.pin("pinned", pinned=False)
        upkeep.turn()
        await until(lambda: set(residency.ready_clients()) == {"lasting"})

    brief = ModelSettings(ttl=NOW)
    pinned = ModelSettings(ttl=NOW, pinned=True)
    serve(tmp_path, scenario, brief=brief, pinned=pinned, leased=brief)


def test_a_model_is_loaded_anew_for_settings_that_need_it(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "m")

    async def scenario(residency: Residency, upkeep: Upkeep, events: Events) -> None:
        def settle(**own: object) -> None:
            named = {"m": ModelSettings(**own)}  # type: ignore[arg-type]
            residency.reconfigure(ModelsSettings(device="cpu", named=named))

        await residency.load("m")
        settle(device="cpu", temperature=0.5, kv_least_tokens=1000)
        upkeep.turn()
        assert state(residency, "m") == "ready"
        assert not told(events, "reload")
        [resident] = residency.room.residents()
        kept = resident.kv_least_bytes
        settle(device="cpu", max_context=512, kv_least_tokens=2000)
        assert residency.room.residents()[0].kv_least_bytes > kept  # at once
        async with residency.lease("m"):
            upkeep.turn()
            assert not told(events, "reload")
        upkeep.turn()
        await until(lambda: lives(folder) == 2 and state(residency, "m") == "ready")
        assert told(events, "reload")[0]["changed"] == ("max_context",)
        assert residency.ready_clients()["m"].ready.context == 512
        upkeep.turn()
        assert len(told(events, "reload")) == 1

    serve(tmp_path, scenario, m=ModelSettings(device="cpu"))


def test_a_load_that_nobody_waits_for_is_called_off(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "slow", FakeModel(load_s=30, bad_lives=1))

    async def scenario(residency: Residency, upkeep: Upkeep, events: Events) -> None:
        first = asyncio.create_task(residency.load("slow"))
        second = asyncio.create_task(residency.load("slow"))
        await until(lambda: lives(folder) == 1)
        first.cancel()
        await asyncio.wait([first])
        assert state(residency, "slow") == "loading"  # the other still waits
        second.cancel()
        await asyncio.wait([second])
        assert state(residency, "slow") == "absent"
        assert not residency.workers()
        assert "model:slow" not in residency.ledger.snapshot()["ram"].owners

    serve(tmp_path, scenario)


def test_an_unload_in_haste_does_not_wait(tmp_path: Path) -> None:
    add_model(tmp_path, "m")

    async def scenario(residency: Residency, upkeep: Upkeep, events: Events) -> None:
        async with residency.lease("m"):
            patient = asyncio.create_task(residency.unload("m"))
            await until(lambda: state(residency, "m") == "draining")
            assert await residency.unload("m", now=True)
            assert await patient
            assert state(residency, "m") == "absent"

    serve(tmp_path, scenario)
