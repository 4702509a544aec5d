"""The server's side of the governor: what is read, how books follow readings, what can be shed.

The shed list, in order: allocators' caches and empty KV extents; KV that no request uses, what
models on a GPU keep in RAM before all other; idle models (least recently used first); and at last
KV in use, for which a worker puts its newest requests back.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from penstock.heap import trim_heap
from penstock.memory.admission import owner_of
from penstock.memory.eviction import choose_shed, choose_victims
from penstock.memory.governor import Act, Governor, Readings
from penstock.memory.readings.gauge import (
    ProcessGauge,
    children_of,
    read_gpus,
    read_process,
    read_ram,
)
from penstock.server.residency.drift_reserve import NOISE_BYTES
from penstock.server.residency.idle_policy import IdlePolicy
from penstock.server.residency.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from penstock.memory.bookings import ProcessBooking
    from penstock.memory.clients.requests import RequestPool
    from penstock.memory.domains import Domain
    from penstock.memory.events import Events
    from penstock.memory.readings.gauge import GpuReading
    from penstock.server.processes.supervisor import Supervisor, WorkerHandle
    from penstock.server.residency.memory_arbiter import Evictable
    from penstock.server.residency.residency import Residency

REST_S = 2.0  # without a request: what a model keeps for its next step is others' meanwhile


def build_governor(
    residency: Residency,
    supervisor: Supervisor,
    server: ProcessBooking,
    requests: RequestPool,
    reclaim: Callable[[int], None],
    hang_s: float,
) -> Governor:
    """A governor over this server's processes and models."""
    events = residency.events
    watchdog = Watchdog(hang_s, events)
    idle_policy = IdlePolicy(residency, events)
    watch = _Watch(residency, supervisor, server, requests, reclaim, events, watchdog, idle_policy)
    return Governor(residency.ledger, watch, shed_list(residency), residency.arbiter.held, events)


@dataclass(slots=True)
class _Watch:
    """What there is to read, and what the books make of it."""

    residency: Residency
    supervisor: Supervisor
    server: ProcessBooking
    requests: RequestPool
    reclaim: Callable[[int], None]  # asks models for unused KV in RAM
    events: Events
    watchdog: Watchdog
    idle_policy: IdlePolicy
    _noted: dict[str, int] = field(default_factory=dict)  # the drift that was last told, by owner
    _gauges: dict[str, ProcessGauge] = field(default_factory=dict)

    def busy(self) -> bool:
        """Whether memory may be moving."""
        loaded = self.residency.loaded_models().values()
        return (
            bool(self.requests.used_bytes)
            or len(self.residency.workers()) > len(loaded)
            or any(model.client.open_requests for model in loaded)
        )

    def reader(self) -> Callable[[], Readings]:
        """Takes all figures, in a thread, by tables as they are now: models come and go on the
        event loop meanwhile."""
        pids = {"server": os.getpid()}
        if (fork_server := self.supervisor.launcher.process()) is not None:
            # In its first seconds it is ours as well, but not yet what it will come to.
            pid, up = fork_server
            pids["fork server" if up else "starting fork server"] = pid
        workers = self.residency.workers()
        pids |= {owner_of(name): worker.pid for name, worker in workers.items()}
        hosts = self.residency.grammar_hosts()
        pids |= {**hosts, **self.residency.helpers}
        known = self._gauges
        self._gauges = {
            owner: known[owner] if owner in known and known[owner].pid == pid else ProcessGauge(pid)
            for owner, pid in pids.items()
        }
        held = self._held_on_gpus()
        return partial(self._read, self._gauges, tuple(workers.values()), held, hosts)

    def _read(
        self,
        gauges: Mapping[str, ProcessGauge],
        workers: Collection[WorkerHandle],
        held_on_gpus: Mapping[Domain, int],
        grammar_hosts: Mapping[str, int],
    ) -> Readings:
        self.watchdog.read(workers)
        found = {owner: gauge.read() for owner, gauge in gauges.items()}
        processes = {owner: reading for owner, reading in found.items() if reading}
        for owner, pid in grammar_hosts.items():
            for child in children_of(pid):
                if (reading := read_process(child)) is not None:
                    processes[f"{owner}, process {child}"] = reading
        gpus = read_gpus()
        own = _gpu_own(gpus, {worker.pid for worker in workers}, held_on_gpus)
        return Readings(read_ram(), gpus, processes, own)

    def _held_on_gpus(self) -> dict[Domain, int]:
        """What is booked on each GPU, but of the KV only what is committed."""
        held: dict[Domain, int] = {}
        for model in self.residency.loaded_models().values():
            grant, status = model.grant, model.client.status
            if grant is not None and not grant.domain.is_ram:
                kv = grant.kv_bytes if status is None else status.kv_committed_bytes
                held[grant.domain] = held.get(grant.domain, 0) + grant.fixed_bytes + kv
        return held

    def reconcile(self, readings: Readings) -> None:
        """Let the books follow what was read; what is more than they have is an event."""
        processes = readings.processes
        if (server := processes.get("server")) is not None:
            # What requests hold is booked of its own.
            size = max(server.anonymous_bytes - self.requests.used_bytes, 0)
            self._note_drift("server", self.server.measured(size))
        if (fork_server := processes.get("fork server")) is not None:
            self._note_drift(
                "fork server", self.residency.fork_server.measured(fork_server.anonymous_bytes)
            )
        unbooked = 0
        for name, model in self.residency.loaded_models().items():
            worker, grant = processes.get(owner_of(name)), model.grant
            if worker is None or grant is None:
                continue
            self._note_drift(owner_of(name), grant.measured(worker.private_dirty_bytes))
            if model.rested(REST_S):
                grant.trim()  # after a rush; what is kept for the next step is others' meanwhile
            unbooked += grant.unbooked_bytes
        unbooked += self.server.unbooked_bytes + self.residency.fork_server.unbooked_bytes
        if unbooked > 0:
            self.reclaim(unbooked)  # KV makes room; the next turn books what was read
        self.watchdog.judge(self.residency.workers())
        self.idle_policy.turn()
        busy = self.busy()
        if not busy:
            trim_heap()
        self.residency.arbiter.spread(busy=busy)

    def _note_drift(self, owner: str, drift: int) -> None:
        self.events.drift[owner] = drift
        if drift <= NOISE_BYTES:
            self._noted.pop(owner, None)
        elif drift > 2 * self._noted.get(owner, 0):
            self._noted[owner] = drift
            self.events.add("drift", owner=owner, drift_bytes=drift)


def _gpu_own(
    gpus: Sequence[GpuReading], workers: Collection[int], held: Mapping[Domain, int]
) -> dict[Domain, int]:
    """Ours on each GPU: what the driver says of our workers, those that load among them; where it
    does not tell, what they hold by our books."""
    own: dict[Domain, int] = {}
    for gpu in gpus:
        told = [size for pid, size in gpu.processes.items() if pid in workers]
        own[gpu.domain] = sum(told) if gpu.processes else held.get(gpu.domain, 0)
    return own


def shed_list(residency: Residency) -> list[Act]:
    """The acts, in the order in which they are tried."""

    def in_domain(domain: Domain) -> dict[str, Evictable]:
        evictables = residency.evictables().items()
        return {
            name: evictable for name, evictable in evictables if evictable.usage().domain == domain
        }

    async def caches(domain: Domain, size: int) -> None:
        if domain.is_ram:
            trim_heap()
        grants = [model.grant for model in residency.loaded_models().values()]
        here = [grant for grant in grants if grant and grant.domain == domain]
        await asyncio.gather(*(asyncio.shield(grant.trim()) for grant in here))

    async def shrink(domain: Domain, size: int, *, in_use: bool) -> None:
        evictables = in_domain(domain)
        usages = [evictable.usage() for evictable in evictables.values()]
        if in_use:
            # The latest used first: what has run longest is nearest to its end.
            usages.sort(key=lambda r: -r.used_at)
            shed = [(r.name, min(size, r.kv_bytes - r.kv_min_bytes)) for r in usages[:1]]
        else:
            shed = list(choose_shed(usages, size, keep_bytes=0))
        await asyncio.gather(
            *(evictables[name].shrink_kv(evictables[name].usage().kv_bytes - n) for name, n in shed)
        )

    async def idle_models(domain: Domain, size: int) -> None:
        evictables = in_domain(domain)
        usages = [evictable.usage() for evictable in evictables.values()]
        wanted = size
        victims: tuple[str, ...] = ()
        # If all idle models together are not enough, they go all the same.
        while wanted > 0 and not (victims := choose_victims(usages, domain, wanted)):
            idle = sum(r.total_bytes for r in usages if r.idle and not r.pinned)
            wanted = min(idle, wanted - 1)
        await asyncio.gather(*(evictables[name].unload() for name in victims))

    return [
        Act("caches", caches),
        Act("unused kv", lambda domain, size: shrink(domain, size, in_use=False)),
        Act("idle models", idle_models),
        Act("kv in use", lambda domain, size: shrink(domain, size, in_use=True)),
    ]
