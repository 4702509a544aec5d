"""The server process from its start to its clean end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from penstock.catalog import Catalog, huggingface_cache
from penstock.config import ConfigError
from penstock.errors import PenstockError
from penstock.memory.baseline import Baseline
from penstock.memory.gauge import read_gpus, read_process, read_ram, resolve_device
from penstock.memory.guard import guard_numbers, guard_sentence, open_books
from penstock.memory.ledger import OutOfBudget
from penstock.memory.limits import SERVER_BYTES, resolve_tier
from penstock.memory.requests import RequestPool, floor_bytes
from penstock.server.api.responses import Responses
from penstock.server.api.services import Services, Texts
from penstock.server.app import build_app
from penstock.server.connection import Connection
from penstock.server.metrics import Metrics
from penstock.server.plans import Storage
from penstock.server.pressure import build_governor
from penstock.server.reconfigure import check_exposure, check_names, reread
from penstock.server.residency import Residency
from penstock.server.response_store import ResponseStore
from penstock.server.signals import take_signals
from penstock.server.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.config import Config
    from penstock.memory.gauge import GpuReading
    from penstock.memory.ledger import Ledger
    from penstock.server.queue import Lane
    from penstock.wire import Status

log = logging.getLogger(__name__)

# Clients keep idle connections for some time; closing first would race with their next request.
_KEEP_CONNECTION_S = 75
# After the grace answers are told to end; this is for saying so.
_LAST_WORDS_S = 2.0
_END_S = 15.0  # for the workers, who have graces of their own below this


@dataclass(frozen=True, slots=True)
class Started:
    """What there is to tell when the server begins to listen."""

    url: str
    models: tuple[str, ...]
    limits: Mapping[str, int]  # bytes per domain
    device: str
    guard: str  # the numbers of the memory guard, in one line
    # Stops the server, on its event loop; a second call does not wait for running answers.
    stop: Callable[[], None]
    # Has the settings read again, on its event loop; what comes of it is an event.
    reread: Callable[[], None]


def run(config: Config, announce: Callable[[Started], None]) -> None:
    """Serve until SIGINT or SIGTERM; a second one does not wait for running answers. SIGHUP has the
    settings read again."""

    def started(server: Started) -> None:
        take_signals(server.stop, server.reread)
        announce(server)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve(config, Supervisor(config.home), started))


async def serve(
    config: Config, supervisor: Supervisor, announce: Callable[[Started], None]
) -> None:
    """Serve with these workers until `Started.stop` is called."""
    check_exposure(config.server)
    catalog = Catalog(config.model_dirs, config.models.hf_cache or huggingface_cache())
    gpus = await asyncio.to_thread(read_gpus)
    ram = await asyncio.to_thread(read_ram)
    ledger = open_books(config.memory, ram, gpus)
    device = resolve_device(config.models.device, gpus)
    models = await asyncio.to_thread(catalog.scan)
    default = config.models.default
    if default is not None:
        default = config.models.canonical(default)
        await asyncio.to_thread(catalog.find, default)
    check_names(config.models, models)
    with _listen(config.server.host, config.server.port) as sock:
        services = build_services(config, catalog, supervisor, ledger, gpus)
        residency = services.residency
        closing = asyncio.Event()
        server = _Server(_uvicorn_config(services, closing))
        load = asyncio.ensure_future(_load_default(residency, default))
        watch = asyncio.ensure_future(services.governor.run())
        try:
            supervisor.warm()
            await services.responses.recover()
            stop = _stopper(server, closing, config.server.shutdown_grace_s)
            limits = {name: state.limit_bytes for name, state in ledger.snapshot().items()}
            guard = guard_sentence(guard_numbers(config, ram, gpus))
            log.info("%s", guard)
            again = _rereader(services)
            announce(Started(_url(sock), tuple(models), limits, device, guard, stop, again))
            await server.serve(sockets=[sock])
        finally:
            load.cancel()
            watch.cancel()
            await asyncio.gather(load, watch, return_exceptions=True)
            await services.responses.close()
            await _end_workers(residency, supervisor)


def build_services(
    config: Config,
    catalog: Catalog,
    supervisor: Supervisor,
    ledger: Ledger,
    gpus: Sequence[GpuReading],
) -> Services:
    """Everything behind the endpoints, joined: who waits for memory hears when there is some."""
    patience_s = config.server.queue_deadline_s
    own = read_process(os.getpid())
    server = Baseline(ledger, "server", SERVER_BYTES if own is None else own.anonymous_bytes)
    requests = _request_pool(config, ledger, server)
    residency = Residency(
        catalog,
        supervisor,
        ledger,
        config.models,
        storage=Storage(
            config.home / "profiles",
            config.cache.dir,
            config.cache.size,
            resolve_tier(config.cache.ram, ledger.snapshot()["ram"].limit_bytes),
        ),
        patience_s=patience_s,
    )
    residency.gpus = gpus
    loop = asyncio.get_running_loop()
    reclaims: set[asyncio.Task[None]] = set()

    lanes: dict[str, Lane] = {}

    def tell_waiters() -> None:
        requests.retry()
        residency.room.wake()
        for lane in lanes.values():
            lane.pump()

    def reclaim(size: int) -> None:
        task = loop.create_task(residency.room.reclaim("ram", size))
        reclaims.add(task)  # the loop itself keeps tasks only weakly
        task.add_done_callback(reclaims.discard)

    def on_room() -> None:
        loop.call_soon(tell_waiters)

    governor = build_governor(
        residency, supervisor, server, requests, reclaim, config.server.hang_s
    )
    metrics = Metrics(lambda: _statuses(residency), ledger, governor)
    ledger.on_room = on_room
    requests.on_starved = reclaim
    residency.room.claimed = lambda: requests.waiting > 0
    settings = config.server
    store = ResponseStore(
        config.home / "responses.db", settings.stored_responses, settings.stored_bytes
    )
    texts = Texts(requests, server)
    return Services(
        config, catalog, residency, metrics, ledger, requests, governor, Responses(store), texts,
        lanes,
    )  # fmt: skip


def _request_pool(config: Config, ledger: Ledger, server: Baseline) -> RequestPool:
    limit = ledger.snapshot()["ram"].limit_bytes
    floor = floor_bytes(limit)
    try:
        return RequestPool(ledger, floor, config.server.max_bodies, config.server.queue_deadline_s)
    except OutOfBudget:
        raise ConfigError(
            f"memory.limit is {limit} bytes, but the server itself holds {server.booked_bytes} and "
            f"keeps {floor} for requests; raise the limit."
        ) from None


async def _end_workers(residency: Residency, supervisor: Supervisor) -> None:
    try:
        async with asyncio.timeout(_END_S):
            await residency.close()
            await supervisor.close()
    except TimeoutError:
        # They notice the end of their sockets when this process is gone.
        log.error("some workers did not end within %g s", _END_S)


class _Server(uvicorn.Server):
    """uvicorn, without its own handling of signals: it would raise them again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to us."""
        yield


def _stopper(server: uvicorn.Server, closing: asyncio.Event, grace_s: float) -> Callable[[], None]:
    """Stops the server; called again, it does not wait for answers."""

    def stop() -> None:
        if server.should_exit:
            closing.set()
            return
        log.info("stopping; running answers have %g s", grace_s)
        server.should_exit = True
        asyncio.get_running_loop().call_later(grace_s, closing.set)

    return stop


def _rereader(services: Services) -> Callable[[], None]:
    """Has the settings read again; nobody waits for what comes of it, so it is logged."""
    tasks: set[asyncio.Task[None]] = set()

    async def read() -> None:
        try:
            await reread(services)
        except PenstockError as error:
            log.error("the settings are as before: %s", error.message)

    def start() -> None:
        task = asyncio.get_running_loop().create_task(read())
        tasks.add(task)  # the loop itself keeps tasks only weakly
        task.add_done_callback(tasks.discard)

    return start


def _uvicorn_config(services: Services, closing: asyncio.Event) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(services, closing),
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_CONNECTION_S,
        timeout_graceful_shutdown=int(services.config.server.shutdown_grace_s + _LAST_WORDS_S) + 1,
    )


async def _load_default(residency: Residency, name: str | None) -> None:
    """Have the default model ready before the first request."""
    if name is None:
        return
    try:
        async with residency.lease(name):
            pass
    except PenstockError as error:
        log.error("the model %s could not be loaded: %s", name, error.message)


def _statuses(residency: Residency) -> dict[str, Status]:
    return {
        name: client.status
        for name, client in residency.ready_clients().items()
        if client.status is not None
    }


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket, or a sentence that says why not."""
    try:
        [family, _, _, _, address] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.create_server((address[0], int(address[1])), family=family, backlog=2048)
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            why = "another program listens there already; choose another with --port"
        raise ConfigError(f"Cannot listen on {host} port {port}: {why}.") from None
    with sock:
        yield sock


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on every system
        return None
    return uvloop.new_event_loop
