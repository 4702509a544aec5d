"""Books that follow readings: a process that grew is booked at KV's cost, and told of once."""

from __future__ import annotations

import asyncio
import os
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from penstock.memory.bookings import ProcessBooking
from penstock.memory.clients.requests import RequestPool
from penstock.memory.domains import RAM, Domain
from penstock.memory.events import Events
from penstock.memory.governor import Readings
from penstock.memory.ledger import Ledger, Purpose
from penstock.memory.readings.gauge import GpuReading, ProcessReading, RamReading
from penstock.server.residency.drift_reserve import NOISE_BYTES
from penstock.server.residency.idle_policy import IdlePolicy
from penstock.server.residency.pressure import _gpu_own, _Watch
from penstock.server.residency.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20


def readings(server: int, fork_server: int) -> Readings:
    def process(size: int) -> ProcessReading:
        return ProcessReading(size, size, size, size, size)

    ram = RamReading(1 << 40, 1 << 39)
    return Readings(ram, (), {"server": process(server), "fork server": process(fork_server)})


def watching(
    residency: Any,
    server: ProcessBooking,
    pool: RequestPool,
    reclaim: Callable[[int], None],
    events: Events,
) -> _Watch:
    return _Watch(
        residency,
        cast("Any", None),
        server,
        pool,
        reclaim,
        events,
        Watchdog(60, events),
        IdlePolicy(residency, events),
    )


def test_a_server_that_grew_takes_from_kv_and_says_so_once() -> None:
    async def body() -> None:
        ledger = Ledger({RAM: 1000 * MIB})
        server = ProcessBooking(ledger, "server", 100 * MIB)
        fork_server = ProcessBooking(ledger, "fork server", 200 * MIB)
        pool = RequestPool(ledger, 50 * MIB, 100 * MIB, 1.0)
        kv = ledger.reserve("model:m", {(RAM, Purpose.KV): ledger.free(RAM)})
        asked: list[int] = []
        events = Events()
        residency = SimpleNamespace(
            fork_server=fork_server,
            loaded_models=dict,
            workers=dict,
            grammar_hosts=dict,
            arbiter=SimpleNamespace(spread=lambda busy: None),
            helpers={},
        )
        watch = watching(residency, server, pool, asked.append, events)

        grown = {"server": 140 * MIB, "fork_server": 200 * MIB}
        watch.reconcile(readings(**grown))
        watch.reconcile(readings(**grown))
        assert asked == [40 * MIB, 40 * MIB]
        assert [row["event"] for row in events.rows()] == ["drift"]
        ledger.check()

        kv.resize({(RAM, Purpose.KV): kv.total() - 40 * MIB})  # what the model gives back
        watch.reconcile(readings(**grown))
        assert server.booked_bytes == 140 * MIB
        assert len(asked) == 2
        watch.reconcile(readings(server=90 * MIB, fork_server=150 * MIB))
        assert (server.booked_bytes, fork_server.booked_bytes) == (90 * MIB, 150 * MIB)
        assert ledger.free(RAM) == 100 * MIB

    asyncio.run(body())


def test_what_requests_hold_is_not_booked_twice() -> None:
    async def body() -> None:
        ledger = Ledger({RAM: 1000 * MIB})
        server = ProcessBooking(ledger, "server", 100 * MIB)
        pool = RequestPool(ledger, 50 * MIB, 100 * MIB, 1.0)
        residency = SimpleNamespace(
            fork_server=ProcessBooking(ledger, "fork server", 1),
            loaded_models=dict,
            workers=dict,
            grammar_hosts=dict,
            arbiter=SimpleNamespace(spread=lambda busy: None),
            helpers={},
        )
        watch = watching(residency, server, pool, lambda _: None, Events())
        with pool.request_memory() as memory:
            await memory.grow(80 * MIB)
            watch.reconcile(readings(server=180 * MIB, fork_server=1))
            assert server.booked_bytes == 100 * MIB

    asyncio.run(body())


def test_a_fork_server_that_still_starts_is_ours_and_booked_by_its_estimate() -> None:
    ledger = Ledger({RAM: 1 << 40})  # this process stands for both, and may be large
    fork_server = ProcessBooking(ledger, "fork server", 400 * MIB)
    residency = SimpleNamespace(
        fork_server=fork_server,
        loaded_models=dict,
        workers=dict,
        grammar_hosts=dict,
        arbiter=SimpleNamespace(spread=lambda busy: 0),
        helpers={},
    )
    pool = RequestPool(ledger, 50 * MIB, 100 * MIB, 1.0)
    server = ProcessBooking(ledger, "server", 100 * MIB)
    watch = watching(residency, server, pool, lambda _: None, Events())
    for up in (False, True):
        launcher = SimpleNamespace(process=lambda: (os.getpid(), up))  # noqa: B023
        watch.supervisor = cast("Any", SimpleNamespace(launcher=launcher))
        found = watch.reader()()
        assert len(found.processes) == 2  # so that its memory is not taken for somebody else's
        watch.reconcile(found)
        assert (fork_server.booked_bytes == 400 * MIB) is not up


def test_models_that_come_while_figures_are_taken_do_no_harm() -> None:
    """Tables are looked at on the event loop only: there they change."""
    lookers: set[str] = set()

    def table() -> dict[str, Any]:
        lookers.add(threading.current_thread().name)
        return {}

    ledger = Ledger({RAM: 1 << 40})
    residency = SimpleNamespace(
        helpers={}, fork_server=None, loaded_models=table, workers=table, grammar_hosts=table
    )
    pool = RequestPool(ledger, 50 * MIB, 100 * MIB, 1.0)
    server = ProcessBooking(ledger, "server", 100 * MIB)
    watch = watching(residency, server, pool, lambda _: None, Events())
    launcher = SimpleNamespace(process=lambda: table() or None)
    watch.supervisor = cast("Any", SimpleNamespace(launcher=launcher))
    thread = threading.Thread(target=watch.reader(), name="apart")
    thread.start()
    thread.join()
    assert lookers == {threading.current_thread().name}


def test_what_is_ours_on_a_gpu_is_the_drivers_word_or_else_our_own() -> None:
    def gpu(index: int, processes: dict[int, int]) -> GpuReading:
        return GpuReading(index, "gpu", f"GPU-{index}", 100, 30, processes)

    gpus = [gpu(0, {7: 20, 8: 5, 9: 40}), gpu(1, {9: 40}), gpu(2, {})]
    held = {reading.domain: 50 for reading in gpus}
    assert _gpu_own(gpus, {7, 8}, held) == {Domain.gpu(0): 25, Domain.gpu(1): 0, Domain.gpu(2): 50}


def test_noise_is_no_drift() -> None:
    ledger = Ledger({RAM: 1000 * MIB})
    baseline = ProcessBooking(ledger, "server", 100 * MIB)
    assert baseline.measured(100 * MIB + NOISE_BYTES) == NOISE_BYTES
    assert baseline.unbooked_bytes == 0
