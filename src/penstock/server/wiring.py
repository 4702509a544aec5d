"""Everything behind the endpoints, made once and joined.

Knows the parts by their constructors, and which of them tell each other what; it runs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from functools import partial
from typing import TYPE_CHECKING

from penstock.config import ConfigError
from penstock.memory.bookings import GrowingReservation, ProcessBooking
from penstock.memory.clients.requests import RequestPool, floor_bytes
from penstock.memory.domains import RAM
from penstock.memory.ledger import OutOfBudget
from penstock.memory.limits import SERVER_BYTES, resolve_grammars, resolve_tier
from penstock.memory.readings.gauge import read_process
from penstock.server.http.connections import Connections, connection_bytes
from penstock.server.metrics import Metrics
from penstock.server.observe.records import open_records
from penstock.server.pipeline.grammars import Grammars, bounds_for
from penstock.server.pipeline.model_texts import Texts
from penstock.server.protocols.openai.response_store import ResponseStore
from penstock.server.protocols.openai.responses import Responses
from penstock.server.protocols.services import Services
from penstock.server.residency.held import held_by_purpose
from penstock.server.residency.load_estimate import Storage
from penstock.server.residency.pressure import build_governor
from penstock.server.residency.residency import Residency

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.catalog import Catalog
    from penstock.config import Config
    from penstock.memory.clients.waits import Ended
    from penstock.memory.events import Events
    from penstock.memory.ledger import Ledger
    from penstock.memory.readings.gauge import GpuReading
    from penstock.server.pipeline.queue import ModelQueue
    from penstock.server.processes.supervisor import Supervisor
    from penstock.wire import Status

log = logging.getLogger(__name__)

_ADMIN_BYTES = 2 << 20  # that operators' requests have for themselves
_ADMIN_S = 10.0
_STREAM_BYTES = 1 << 20  # rows that are kept for /admin/api/stream
_OTHER_FILES = 256  # beside connections: models, the store, workers


def build_services(
    config: Config,
    catalog: Catalog,
    supervisor: Supervisor,
    ledger: Ledger,
    gpus: Sequence[GpuReading],
) -> Services:
    """All parts of a server; those that wait for memory are woken when some is given back."""
    own = read_process(os.getpid())
    server = ProcessBooking(ledger, "server", SERVER_BYTES if own is None else own.anonymous_bytes)
    requests, admin_requests, connections = _front_memory(config, ledger, server)
    stream = GrowingReservation(ledger, "admin stream", 0, _STREAM_BYTES)
    server.elsewhere = lambda: (
        admin_requests.used_bytes + connections.booked_bytes + stream.used_bytes
    )
    residency = _residency(config, catalog, supervisor, ledger, gpus)
    queues: dict[str, ModelQueue] = {}
    reclaim = _wake_waiters(ledger, requests, residency, queues)
    grammars = _grammars(config, ledger, residency)
    governor = build_governor(
        residency, supervisor, server, requests, reclaim, config.server.hang_s
    )
    requests.client_waits.on_end = partial(_note_slow_client, residency.events)
    records = open_records(residency.events, stream)
    services = Services(
        config=config,
        catalog=catalog,
        residency=residency,
        metrics=Metrics(
            lambda: _statuses(residency),
            ledger,
            governor,
            records.refusals.counts,
            lambda: held_by_purpose(residency.loaded_models().values(), requests.used_bytes),
        ),
        ledger=ledger,
        requests=requests,
        texts=Texts(ledger, residency.arbiter, server, config.server.queue_deadline_s),
        grammars=grammars,
        queues=queues,
        admin_requests=admin_requests,
        connections=connections,
        governor=governor,
        responses=Responses(_response_store(config), residency.events),
        records=records,
    )
    residency.on_ready = services.connect_queue
    return services


def _residency(
    config: Config,
    catalog: Catalog,
    supervisor: Supervisor,
    ledger: Ledger,
    gpus: Sequence[GpuReading],
) -> Residency:
    residency = Residency(
        catalog,
        supervisor,
        ledger,
        config.models,
        storage=Storage(
            config.home / "profiles",
            config.cache.dir,
            config.cache.size,
            resolve_tier(config.cache.ram, ledger.snapshot()[RAM].limit_bytes),
        ),
        patience_s=config.server.queue_deadline_s,
    )
    residency.gpus = gpus
    return residency


def _wake_waiters(
    ledger: Ledger,
    requests: RequestPool,
    residency: Residency,
    queues: Mapping[str, ModelQueue],
) -> Callable[[int], None]:
    """Requests, loads and queues try again when memory is given back; requests that find none have
    some reclaimed. How, for those who need the same."""
    loop = asyncio.get_running_loop()
    reclaims: set[asyncio.Task[None]] = set()

    def tell_waiters() -> None:
        requests.retry()
        residency.arbiter.wake()
        for queue in queues.values():
            queue.pump()

    def reclaim(size: int) -> None:
        task = loop.create_task(residency.arbiter.reclaim(RAM, size))
        reclaims.add(task)  # the loop itself keeps tasks only weakly
        task.add_done_callback(reclaims.discard)

    def on_room() -> None:
        loop.call_soon(tell_waiters)

    ledger.on_room = on_room
    requests.on_starved = reclaim
    residency.arbiter.claimed = lambda: requests.waiting > 0
    return reclaim


def _note_slow_client(events: Events, ended: Ended) -> None:
    events.add(
        "slow client ended",
        client=ended.client,
        held_bytes=ended.held_bytes,
        moved_bytes=ended.moved_bytes,
        waited_s=round(ended.waited_s, 1),
    )


def _response_store(config: Config) -> ResponseStore:
    settings = config.server
    return ResponseStore(
        config.home / "responses.db", settings.stored_responses, settings.stored_bytes
    )


def _grammars(config: Config, ledger: Ledger, residency: Residency) -> Grammars:
    size = resolve_grammars(config.memory.grammars, ledger.snapshot()[RAM].limit_bytes)
    bounds = bounds_for(size, config.server.grammar_timeout_s)
    logs, patience_s = config.home / "logs", config.server.queue_deadline_s
    grammars = Grammars(ledger, residency.arbiter, logs, bounds, patience_s)
    residency.grammar_socket = grammars.worker_socket
    residency.grammar_hosts = grammars.processes
    return grammars


def _front_memory(
    config: Config, ledger: Ledger, server: ProcessBooking
) -> tuple[RequestPool, RequestPool, Connections]:
    """What is kept of the limit for clients' requests, for operators', and for connections."""
    settings, limit = config.server, ledger.snapshot()[RAM].limit_bytes
    floor, (kept, most) = floor_bytes(limit), connection_bytes(limit)
    patience_s = settings.queue_deadline_s
    try:
        requests = RequestPool(ledger, floor, settings.max_bodies, patience_s)
        admin = RequestPool(ledger, _ADMIN_BYTES, _ADMIN_BYTES, _ADMIN_S, "admin requests")
        memory = GrowingReservation(ledger, "connections", kept, most)
    except OutOfBudget:
        raise ConfigError(
            f"memory.limit is {limit} bytes, but the server itself holds {server.booked_bytes} and "
            f"keeps {floor + kept} for requests and connections; raise the limit."
        ) from None
    count = min(settings.max_connections, _open_files(settings.max_connections))
    per_client = settings.max_connections_per_address or max(count // 2, 1)
    return requests, admin, Connections(count, per_client, memory)


def _open_files(wanted: int) -> int:
    """How many connections the process may have open; its limit is raised where that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < needed:
            log.warning(
                "at most %d connections, for the process may open %d files (ulimit -n)",
                max(soft - _OTHER_FILES, 1), soft,
            )  # fmt: skip
        return max(soft - _OTHER_FILES, 1)
    return wanted


def _statuses(residency: Residency) -> dict[str, Status]:
    return {
        name: client.status
        for name, client in residency.ready_clients().items()
        if client.status is not None
    }
