"""Idle models over real processes: past their time they go, for new settings they load anew."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.catalog import Catalog
from penstock.config import ModelSettings, ModelsSettings
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger
from penstock.memory.limits import GIB
from penstock.server.processes.fork_launcher import ForkLauncher
from penstock.server.processes.supervisor import Supervisor
from penstock.server.residency import idle_policy as idle_policy_module
from penstock.server.residency.idle_policy import IdlePolicy
from penstock.server.residency.load_estimate import Storage
from penstock.server.residency.residency import Residency
from penstock.testing.fake_server import add_model
from penstock.testing.fake_worker import FAKE_PRELOAD, FakeModel, lives

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    import pytest

    from penstock.memory.events import Events

NOW = 1e-9  # of a ttl: any idleness is too long


def serve(
    home: Path,
    scenario: Callable[[Residency, IdlePolicy, Events], Coroutine[None, None, None]],
    **named: ModelSettings,
) -> None:
    async def body() -> None:
        supervisor = Supervisor(
            home,
            ForkLauncher(home, engine_module="penstock.testing.fake_worker", preload=FAKE_PRELOAD),
        )
        ledger = Ledger({RAM: 64 * GIB})
        residency = Residency(
            Catalog([home / "models"]),
            supervisor,
            ledger,
            ModelsSettings(device="cpu", named=named),
            storage=Storage(home / "profiles"),
        )
        try:
            await scenario(residency, IdlePolicy(residency, residency.events), residency.events)
        finally:
            await residency.close()
            await supervisor.close()
        ledger.check()
        assert set(ledger.snapshot()[RAM].owners) <= {"fork server"}

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

    async def scenario(residency: Residency, idle_policy: IdlePolicy, events: Events) -> None:
        for name in ("brief", "pinned", "lasting"):
            await residency.load(name)
        async with residency.lease("leased"):
            idle_policy.turn()
            idle_policy.turn()  # what is on its way is not begun again
            await until(lambda: state(residency, "brief") == "absent")
            await until(lambda: bool(told(events, "unload")))
            [row] = told(events, "unload")
            assert (row["model"], row["reason"]) == ("brief", "ttl")
            await residency.pin("pinned", pinned=False)
        idle_policy.turn()
        await until(lambda: set(residency.ready_clients()) == {"lasting"})

    brief = ModelSettings(ttl=NOW)
    pinned = ModelSettings(ttl=NOW, pinned=True)
    serve(tmp_path, scenario, brief=brief, pinned=pinned, leased=brief)


def test_a_model_is_loaded_anew_for_settings_that_need_it(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "m")

    async def scenario(residency: Residency, idle_policy: IdlePolicy, events: Events) -> None:
        def configure(**own: object) -> None:
            named = {"m": ModelSettings(**own)}  # type: ignore[arg-type]
            residency.reconfigure(ModelsSettings(device="cpu", named=named))

        await residency.load("m")
        configure(device="cpu", temperature=0.5, kv_min_tokens=1000)
        idle_policy.turn()
        assert state(residency, "m") == "ready"
        assert not told(events, "reload")
        [usage] = residency.arbiter.usages()
        kept = usage.kv_min_bytes
        configure(device="cpu", max_context=512, kv_min_tokens=2000)
        assert residency.arbiter.usages()[0].kv_min_bytes > kept  # at once
        async with residency.lease("m"):
            idle_policy.turn()
            assert not told(events, "reload")
        idle_policy.turn()
        await until(lambda: lives(folder) == 2 and state(residency, "m") == "ready")
        assert told(events, "reload")[0]["changed"] == ("max_context",)
        assert residency.ready_clients()["m"].ready.context == 512
        idle_policy.turn()
        assert len(told(events, "reload")) == 1

    serve(tmp_path, scenario, m=ModelSettings(device="cpu"))


def test_a_model_is_loaded_anew_once_for_a_better_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = add_model(tmp_path, "m", FakeModel(wants_reload=True))

    async def scenario(residency: Residency, idle_policy: IdlePolicy, events: Events) -> None:
        await residency.load("m")

        def wants_reload() -> bool:
            status = residency.loaded_models()["m"].client.status
            return status is not None and status.wants_reload

        await until(wants_reload)
        idle_policy.turn()
        assert not told(events, "reload"), "it has only just been used"
        monkeypatch.setattr(idle_policy_module, "RELOAD_IDLE_S", 0.0)
        idle_policy.turn()
        await until(lambda: lives(folder) == 2 and state(residency, "m") == "ready")
        assert [row["changed"] for row in told(events, "reload")] == [("profile",)]
        await until(wants_reload)
        idle_policy.turn()
        assert len(told(events, "reload")) == 1, "never twice"

    serve(tmp_path, scenario)


def test_a_load_that_nobody_waits_for_is_called_off(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "slow", FakeModel(load_s=30, bad_lives=1))

    async def scenario(residency: Residency, idle_policy: IdlePolicy, events: Events) -> None:
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
        assert "model:slow" not in residency.ledger.snapshot()[RAM].owners

    serve(tmp_path, scenario)


def test_an_unload_in_haste_does_not_wait(tmp_path: Path) -> None:
    add_model(tmp_path, "m")

    async def scenario(residency: Residency, idle_policy: IdlePolicy, events: Events) -> None:
        async with residency.lease("m"):
            patient = asyncio.create_task(residency.unload("m"))
            await until(lambda: state(residency, "m") == "draining")
            assert await residency.unload("m", now=True)
            assert await patient
            assert state(residency, "m") == "absent"

    serve(tmp_path, scenario)
