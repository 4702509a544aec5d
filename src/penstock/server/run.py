"""The server process from its start to its clean end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from penstock.catalog import Catalog, huggingface_cache
from penstock.errors import PenstockError
from penstock.memory.guard import guard_numbers, guard_sentence, open_books
from penstock.memory.readings.gauge import read_gpus, read_ram, resolve_device
from penstock.server.admin.reconfigure import check_exposure, check_names, make_named, reread
from penstock.server.admin.stream import watch
from penstock.server.app import build_app
from penstock.server.http.listening import descriptors, listen, protocol, url_of
from penstock.server.observe.tracing import open_spans
from penstock.server.process_exit import leave, leave_within
from penstock.server.processes.fork_launcher import ForkLauncher
from penstock.server.processes.supervisor import Supervisor
from penstock.server.signals import take_signals
from penstock.server.wiring import build_services

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.config import Config
    from penstock.memory.domains import Domain
    from penstock.server.protocols.services import Services
    from penstock.server.residency.residency import Residency

log = logging.getLogger(__name__)

# Clients keep idle connections for some time; closing first would race with their next request.
_KEEP_CONNECTION_S = 75
# After the grace answers are told to end; this is for saying so.
_LAST_WORDS_S = 2.0
_END_S = 15.0  # for the workers, who have graces of their own below this
_SPARE_S = 5.0
# For which another thread keeps Python's lock while the event loop waits for it; 5 ms if unset.
_SWITCH_S = 0.0005


@dataclass(frozen=True, slots=True)
class Started:
    """What there is to tell when the server begins to listen."""

    url: str
    models: tuple[str, ...]
    limits: Mapping[Domain, int]  # in bytes
    device: str
    guard: str  # the numbers of the memory guard, in one line
    # Stops the server, on its event loop; a second call does not wait for running answers.
    stop: Callable[[], None]
    # Has the settings read again, on its event loop; what comes of it is an event.
    reread: Callable[[], None]


def run(config: Config, announce: Callable[[Started], None]) -> None:
    """Serve until SIGINT or SIGTERM; a second one does not wait for running answers. SIGHUP has the
    settings read again. Ends this process: it does not wait for threads that are stuck."""
    grace_s = config.server.shutdown_grace_s

    def started(server: Started) -> None:
        def stop() -> None:
            nonlocal grace_s
            leave_within(grace_s + _LAST_WORDS_S + _END_S + _SPARE_S)
            grace_s = 0.0  # for the next signal
            server.stop()

        take_signals(stop, server.reread)
        announce(server)

    async def serve_and_leave() -> None:
        await serve(config, Supervisor(config.home, ForkLauncher(config.home)), started)
        leave()

    sys.setswitchinterval(_SWITCH_S)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve_and_leave())


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
    await asyncio.to_thread(make_named, catalog, config.models)
    models = await asyncio.to_thread(catalog.scan)
    default = config.models.default
    if default is not None:
        default = config.models.canonical(default)
    check_names(config.models, models)
    with listen(config.server.host, config.server.port) as sock:
        services = build_services(config, catalog, supervisor, ledger, gpus)
        residency, services.url = services.residency, url_of(sock)
        closing = asyncio.Event()
        server = _Server(_uvicorn_config(services, closing))
        load = asyncio.ensure_future(_load_default(residency, default))
        if (spans := open_spans()) is not None:
            services.live.on_end = spans.record
        govern = asyncio.ensure_future(services.governor.run())
        observe = asyncio.ensure_future(watch(services))
        try:
            supervisor.launcher.warm()
            await services.responses.recover()
            stop = _stopper(server, closing, services)
            limits = {domain: state.limit_bytes for domain, state in ledger.snapshot().items()}
            guard = guard_sentence(guard_numbers(config, ram, gpus))
            log.info("%s", guard)
            again = _rereader(services)
            announce(Started(services.url, tuple(models), limits, device, guard, stop, again))
            await server.serve(sockets=descriptors(sock))
        finally:
            for task in (load, govern, observe):
                task.cancel()
            await asyncio.gather(load, govern, observe, return_exceptions=True)
            services.records.tasks.close()
            if spans is not None:
                await asyncio.to_thread(spans.close)
            await services.responses.close()
            await services.grammars.close()
            await _end_workers(residency, supervisor)


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


def _stopper(
    server: uvicorn.Server, closing: asyncio.Event, services: Services
) -> Callable[[], None]:
    """Stops the server; called again, it does not wait for answers. Nor are those waited for who
    only watch."""
    grace_s = services.config.server.shutdown_grace_s

    def stop() -> None:
        if server.should_exit:
            closing.set()
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, _force, server)
            return
        log.info("stopping; running answers have %g s", grace_s)
        server.should_exit = True
        services.records.broadcast.close()
        asyncio.get_running_loop().call_later(grace_s, closing.set)

    return stop


def _force(server: uvicorn.Server) -> None:
    """Whatever still runs is not waited for."""
    server.force_exit = True


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
        http=protocol(services.connections),  # type: ignore[arg-type]
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


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on every system
        return None
    return uvloop.new_event_loop
