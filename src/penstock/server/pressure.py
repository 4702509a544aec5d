"""The server's side of the governor: what is read, how books follow readings, what can be shed.

The shed list, in order: allocators' caches and empty KV extents; KV that no request uses, what
models on a GPU keep in RAM before all other; idle models (least recently used first); and at last
KV in use, for which a worker puts its newest requests back.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from penstock.memory.admission import choose_shed, choose_victims, owner_of
from penstock.memory.gauge import ProcessGauge, read_gpus, read_ram
from penstock.memory.governor import Act, Governor, Readings
from penstock.memory.slack import NOISE_BYTES
from penstock.server.upkeep import Upkeep
from penstock.server.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from penstock.memory.baseline import Baseline
    from penstock.memory.events import Events
    from penstock.memory.gauge import GpuReading
    from penstock.memory.requests import RequestPool
    from penstock.server.residency import Residency
    from penstock.server.room import Tenant
    from penstock.server.supervisor import Supervisor, WorkerHandle

REST_S = 2.0  # without a request: what a model keeps for its next step is others' meanwhile
_libc = ctypes.CDLL(None)


def build_governor(
    residency: Residency,
    supervisor: Supervisor,
    server: Baseline,
    requests: RequestPool,
    reclaim: Callable[[int], None],
    hang_s: float,
) -> Governor:
    """A governor over this server's processes and models."""
    events = residency.events
    watchdog = Watchdog(hang_s, events)
    upkeep = Upkeep(residency, events)
    watch = _Watch(residency, supervisor, server, requests, reclaim, events, watchdog, upkeep)
    return Governor(residency.ledger, watch, shed_list(residency), residency.room.held, events)


@dataclass(slots=True)
class _Watch:
    """What there is to read, and what the books make of it."""

    residency: Residency
    supervisor: Supervisor
    server: Baseline
    requests: RequestPool
    reclaim: Callable[[int], None]  # asks models for unused KV in `ram`
    events: Events
    watchdog: Watchdog
    upkeep: Upkeep
    _noted: dict[str, int] = field(default_factory=dict)  # the drift that was last told, by owner
    _gauges: dict[str, ProcessGauge] = field(default_factory=dict)

    def busy(self) -> bool:
        """Whether memory may be moving."""
        loaded = self.residency.tenants().values()
        return (
            bool(self.requests.used_bytes)
            or len(self.residency.workers()) > len(loaded)
            or any(model.client.open_requests for model in loaded)
        )

    def reader(self) -> Callable[[], Readings]:
        """Takes all figures, in a thread, by tables as they are now: models come and go on the
        event loop meanwhile."""
        pids = {"server": os.getpid()}
        if (template := self.supervisor.template_process()) is not None:
            # In its first seconds it is ours as well, but not yet what it will come to.
            pid, up = template
            pids["template" if up else "starting template"] = pid
        workers = self.residency.workers()
        pids |= {owner_of(name): worker.pid for name, worker in workers.items()}
        known = self._gauges
        self._gauges = {
            owner: known[owner] if owner in known and known[owner].pid == pid else ProcessGauge(pid)
            for owner, pid in pids.items()
        }
        return partial(self._read, self._gauges, tuple(workers.values()), self._held_on_gpus())

    def _read(
        self,
        gauges: Mapping[str, ProcessGauge],
        workers: Collection[WorkerHandle],
        held_on_gpus: Mapping[str, int],
    ) -> Readings:
        self.watchdog.read(workers)
        found = {owner: gauge.read() for owner, gauge in gauges.items()}
        processes = {owner: reading for owner, reading in found.items() if reading}
        gpus = read_gpus()
        own = _gpu_own(gpus, {worker.pid for worker in workers}, held_on_gpus)
        return Readings(read_ram(), gpus, processes, own)

    def _held_on_gpus(self) -> dict[str, int]:
        """What is booked on each GPU, but of the KV only what is committed."""
        held: dict[str, int] = {}
        for model in self.residency.tenants().values():
            holding, status = model.holding, model.client.status
            if holding is not None and holding.domain != "ram":
                kv = holding.kv_bytes if status is None else status.kv_committed_bytes
                held[holding.domain] = held.get(holding.domain, 0) + holding.fixed_bytes + kv
        return held

    def reconcile(self, readings: Readings) -> None:
        """Let the books follow what was read; a surprise is an event."""
        processes = readings.processes
        if (server := processes.get("server")) is not None:
            # What requests hold is booked of its own.
            size = max(server.anonymous_bytes - self.requests.used_bytes, 0)
            self._surprise("server", self.server.measured(size))
        if (template := processes.get("template")) is not None:
            self._surprise("template", self.residency.template.measured(template.anonymous_bytes))
        unbooked = 0
        for name, model in self.residency.tenants().items():
            worker, holding = processes.get(owner_of(name)), model.holding
            if worker is None or holding is None:
                continue
            self._surprise(owner_of(name), holding.measured(worker.private_dirty_bytes))
            if model.rested(REST_S):
                holding.trim()  # after a rush; what is kept for the next step is others' meanwhile
            unbooked += holding.unbooked_bytes
        unbooked += self.server.unbooked_bytes + self.residency.template.unbooked_bytes
        if unbooked > 0:
            self.reclaim(unbooked)  # KV makes room; the next turn books what was read
        self.watchdog.judge(self.residency.workers())
        self.upkeep.turn()
        busy = self.busy()
        if not busy:
            trim_heap()
        self.residency.room.spread(busy=busy)

    def _surprise(self, owner: str, drift: int) -> None:
        self.events.drift[owner] = drift
        if drift <= NOISE_BYTES:
            self._noted.pop(owner, None)
        elif drift > 2 * self._noted.get(owner, 0):
            self._noted[owner] = drift
            self.events.add("drift", owner=owner, drift_bytes=drift)


def _gpu_own(
    gpus: Sequence[GpuReading], workers: Collection[int], held: Mapping[str, int]
) -> dict[str, int]:
    """Ours on each GPU: what the driver says of our workers, those that load among them; where it
    does not tell, what they hold by our books."""
    own: dict[str, int] = {}
    for gpu in gpus:
        domain = f"gpu:{gpu.index}"
        told = [size for pid, size in gpu.processes.items() if pid in workers]
        own[domain] = sum(told) if gpu.processes else held.get(domain, 0)
    return own


def trim_heap() -> None:
    """Give back what the C library keeps: after a long text is tokenised that is most of it."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def shed_list(residency: Residency) -> list[Act]:
    """The acts, in the order in which they are tried."""

    def in_domain(domain: str) -> dict[str, Tenant]:
        tenants = residency.memory_tenants().items()
        return {name: tenant for name, tenant in tenants if tenant.resident().domain == domain}

    async def caches(domain: str, size: int) -> None:
        if domain == "ram":
            trim_heap()
        holdings = [model.holding for model in residency.tenants().values()]
        here = [holding for holding in holdings if holding and holding.domain == domain]
        await asyncio.gather(*(asyncio.shield(holding.trim()) for holding in here))

    async def shrink(domain: str, size: int, *, in_use: bool) -> None:
        tenants = in_domain(domain)
        residents = [tenant.resident() for tenant in tenants.values()]
        if in_use:
            # The latest used first: what has run longest is nearest to its end.
            residents.sort(key=lambda r: -r.used_at)
            shed = [(r.name, min(size, r.kv_bytes - r.kv_least_bytes)) for r in residents[:1]]
        else:
            shed = list(choose_shed(residents, size, keep_bytes=0))
        await asyncio.gather(
            *(tenants[name].shrink_kv(tenants[name].resident().kv_bytes - n) for name, n in shed)
        )

    async def idle_models(domain: str, size: int) -> None:
        tenants = in_domain(domain)
        residents = [tenant.resident() for tenant in tenants.values()]
        wanted = size
        victims: tuple[str, ...] = ()
        # If all idle models together are not enough, they go all the same.
        while wanted > 0 and not (victims := choose_victims(residents, domain, wanted)):
            idle = sum(r.total_bytes for r in residents if r.idle and not r.pinned)
            wanted = min(idle, wanted - 1)
        await asyncio.gather(*(tenants[name].unload() for name in victims))

    return [
        Act("caches", caches),
        Act("unused kv", lambda domain, size: shrink(domain, size, in_use=False)),
        Act("idle models", idle_models),
        Act("kv in use", lambda domain, size: shrink(domain, size, in_use=True)),
    ]
