"""Which models are loaded, and who is using them.

A lease is the only way to a model: it loads an absent one, waits for one that is on its way,
replaces a dead worker, and keeps the model until the lease ends. Everything runs on the event
loop, and a decision never has an await in it, so there are no locks. What a load may have and who
makes room for it is decided in `memory_arbiter`; what a model holds is in its `MemoryGrant`.

A request whose worker is lost may lease the same model again: the lease then waits for the
restart. The loss is hidden from the client as long as `Sink.restart()` says it has seen nothing.

A load is wanted by those who wait for it. Until it has its room, it ends with the last of them: it
would unload others for nobody. Once its process runs it goes on: whoever left is likely to come
back, and an idle model is in nobody's way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.catalog import Card  # noqa: TC001 - a NamedTuple's fields are read at run time
from penstock.catalog.scan import file_marks
from penstock.errors import InternalError, ModelTooLarge, Overloaded, PenstockError, WorkerLost
from penstock.memory.admission import largest_kv
from penstock.memory.bookings import ProcessBooking
from penstock.memory.domains import domain_of
from penstock.memory.events import Events
from penstock.memory.limits import FORK_SERVER_BYTES
from penstock.memory.readings.gauge import GpuReading, read_gpus, read_process, resolve_device
from penstock.server.processes.supervisor import STOP_GRACE_S
from penstock.server.processes.worker_client import ModelClient  # noqa: TC001
from penstock.server.residency.load_estimate import LoadEstimate, Storage, estimate_load
from penstock.server.residency.memory_arbiter import MemoryArbiter
from penstock.server.residency.memory_grant import MemoryGrant
from penstock.server.residency.model import Model, State, end_worker, run_to_end
from penstock.server.residency.ram_tier import RamTier, ram_tiers

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
    from contextlib import AbstractContextManager

    from penstock.catalog import Catalog
    from penstock.config import ModelsSettings
    from penstock.memory.admission import ModelCapacity
    from penstock.memory.ledger import Ledger
    from penstock.server.processes.supervisor import Supervisor, WorkerHandle
    from penstock.server.residency.memory_arbiter import Evictable
    from penstock.wire import LoadSpec

log = logging.getLogger(__name__)


class Lease(NamedTuple):
    """A loaded model, for as long as the lease is held."""

    card: Card
    client: ModelClient


class Residency:
    """The models of one server."""

    def __init__(
        self,
        catalog: Catalog,
        supervisor: Supervisor,
        ledger: Ledger,
        settings: ModelsSettings,
        *,
        storage: Storage,
        patience_s: float = 600.0,
    ) -> None:
        self.events = Events()
        self.fork_server = ProcessBooking(ledger, "fork server", FORK_SERVER_BYTES)
        self.arbiter = MemoryArbiter(ledger, self.evictables, patience_s)
        self._catalog = catalog
        self._supervisor = supervisor
        self.ledger = ledger
        self.settings = settings
        self._storage = storage
        self._models: dict[str, Model] = {}
        # A worker's way to the grammar host of its model; it gets a copy of the socket.
        self.grammar_socket: Callable[[str], AbstractContextManager[socket.socket | None]] = (
            lambda _: contextlib.nullcontext()
        )
        self.grammar_hosts: Callable[[], Mapping[str, int]] = dict  # process ids, by owner
        self.helpers: dict[str, int] = {}  # processes that are booked by others, by owner
        self.on_ready: Callable[[Model], None] = lambda _: None  # before the first lease
        self.gpus: Sequence[GpuReading] = ()  # as last read, at a load or at the start
        self._closed = False

    @contextlib.asynccontextmanager
    async def lease(self, name: str, wait_s: float | None = None) -> AsyncIterator[Lease]:
        """The model, loaded; it stays until the block ends. Raises why it cannot be had."""
        model = await self._find(name)
        if model.state is State.FAILED:
            await self._look_again(model)
        model.waiting += 1
        try:
            async with asyncio.timeout(wait_s):
                worker = await self._ensure_ready(model)
        except TimeoutError:
            raise Overloaded(
                f"The request has waited until its deadline for the model {name!r}, which is "
                f"{model.state.value} (server.queue_deadline_s).",
                retry_after_s=30,
            ) from None
        finally:
            model.waiting -= 1
            if model.worker is None and not model.waiting:
                model.cancel_load()
        assert model.card is not None
        model.leases += 1
        try:
            yield Lease(model.card, worker.client)
        finally:
            model.leases -= 1
            model.used_at = time.monotonic()
            model.changed.set()
            self.arbiter.wake()

    async def load(self, name: str) -> None:
        """Have the model ready. Who gives up waiting ends a load that nobody else waits for."""
        try:
            async with self.lease(name):
                pass
        except asyncio.CancelledError:
            model = self._models.get(name)
            if model is not None and model.state is State.LOADING and not model.waiting:
                await self.unload(name)
            raise

    async def unload(
        self,
        name: str,
        grace_s: float = STOP_GRACE_S,
        *,
        reason: str = "asked",
        now: bool = False,
    ) -> bool:
        """Let the running requests finish, unless it must be `now`, then end the worker; a load is
        cancelled, and who waits for it is told so. False if there was neither."""
        model = self._models.get(name)
        if model is None or model.state not in (State.LOADING, State.READY, State.DRAINING):
            return False
        if model.state is State.READY:
            model.hurried = False
            model.enter(State.DRAINING)
            self._begin(model, self._drain(model, grace_s, reason))
        assert model.task is not None
        task = model.task
        if model.state is State.LOADING:
            model.cancels += 1
            model.cancel_load()
        if now:
            model.hurried = True
            model.changed.set()
        await asyncio.wait([task])
        return True

    async def pin(self, name: str, *, pinned: bool) -> None:
        """Keep a model, or no longer; until the server ends or the settings say otherwise."""
        (await self._find(name)).pinned = pinned
        self.arbiter.wake()

    def reconfigure(self, settings: ModelsSettings) -> None:
        """These hold from now on; a model that must be loaded anew for them is `IdlePolicy`'s."""
        before, self.settings = self.settings, settings
        for model in self._models.values():
            own = settings.settings(model.name)
            if own.pinned != before.settings(model.name).pinned:
                model.pinned = own.pinned
            if model.grant is not None:
                model.grant.adopt(own)
            if model.state is State.FAILED and own != before.settings(model.name):
                model.reset_failures()
        self.arbiter.wake()

    def snapshot(self) -> list[dict[str, object]]:
        """One row per model that is or was wanted, for `penstock ps` and the dashboard."""
        return [model.row() for model in self._models.values()]

    def ready_clients(self) -> dict[str, ModelClient]:
        """The models that answer now, by name, for probes and metrics."""
        return {name: model.client for name, model in self.loaded_models().items()}

    def loaded_models(self) -> dict[str, Model]:
        """The loaded models, as those whose memory can move."""
        return {
            model.name: model
            for model in self._models.values()
            if model.state is State.READY and model.worker is not None and model.worker.alive
        }

    def evictables(self) -> dict[str, Evictable]:
        """All who have memory to give: the loaded models, and what those on a GPU keep in RAM."""
        evictables: dict[str, Evictable] = dict(self.loaded_models())
        for tier in self._ram_tiers():
            evictables[tier.name] = tier
        return evictables

    def _ram_tiers(self) -> list[RamTier]:
        return ram_tiers(self.loaded_models(), self._storage.tier_bytes)

    def workers(self) -> dict[str, WorkerHandle]:
        """All worker processes there are, loading and ending ones too."""
        return {
            model.name: model.worker for model in self._models.values() if model.worker is not None
        }

    def plan(self, card: Card) -> LoadEstimate:
        """How a model would be loaded: device and dtype resolved."""
        settings = self.settings.settings(card.name)
        device = resolve_device(settings.device, self.gpus)
        limit_bytes = self.ledger.snapshot()[domain_of(device)].limit_bytes
        return estimate_load(card, settings, device, limit_bytes)

    def capacity_of(self, card: Card) -> ModelCapacity:
        """A model as admission sees it, loaded or not."""
        return self._capacity_now(card.name) or self.plan(card).capacity()

    def _capacity_now(self, name: str) -> ModelCapacity | None:
        model = self.loaded_models().get(name)
        return None if model is None or model.grant is None else model.grant.capacity()

    async def grow(self, card: Card, kv_bytes: int) -> None:
        """Try to give a loaded model so much KV, at the cost of idle ones."""
        begun, before = time.monotonic(), self._capacity_now(card.name)
        await self.arbiter.grow(lambda: self._capacity_now(card.name), card.name, kv_bytes)
        after = self._capacity_now(card.name)
        if before is None or after is None:
            return
        was, has = before.kv_now_bytes or 0, after.kv_now_bytes or 0
        if has > was:
            took_s = round(time.monotonic() - begun, 4)
            self.events.add("kv grown", model=card.name, kv_bytes=has, was_bytes=was, took_s=took_s)

    async def close(self, grace_s: float = STOP_GRACE_S) -> None:
        """End every load and every worker now; open requests and waiting leases are told so."""
        self._closed = True
        tasks = [model.task for model in self._models.values() if model.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        workers = [model.worker for model in self._models.values() if model.worker is not None]
        await asyncio.gather(*(worker.stop(grace_s) for worker in workers))
        for model in self._models.values():
            model.enter(State.ABSENT)

    async def _find(self, name: str) -> Model:
        if (model := self._models.get(name)) is not None:
            return model
        card = await asyncio.to_thread(self._catalog.find, name)
        model = Model(card.name, self.settings.settings(card.name).pinned, self.events)
        model.unload_idle = lambda: self._unload_idle(model)
        return self._models.setdefault(card.name, model)

    async def _unload_idle(self, model: Model) -> None:
        """For another model's sake: not if someone came meanwhile, or pinned it."""
        if model.state is State.READY and model.idle and not model.pinned:
            await self.unload(model.name, reason="room")

    async def _look_again(self, model: Model) -> None:
        """Whoever repairs a model's files need not wait for the next attempt."""
        card, files = model.card, model.files
        same = card is not None and files == await asyncio.to_thread(file_marks, card.path)
        if not same and model.state is State.FAILED:
            model.reset_failures()

    async def _ensure_ready(self, model: Model) -> WorkerHandle:
        """Returns in the same turn of the loop in which the model was seen to be ready."""
        cancels = model.cancels
        while True:
            if self._closed:
                raise Overloaded("The server is shutting down.", retry_after_s=5)
            if model.cancels != cancels:
                raise model.cancelled()
            if model.state is State.READY:
                assert model.worker is not None
                if model.worker.alive and not model.holds_new_leases:
                    return model.worker
                await model.wait()  # for `on_exit`, or until it takes new leases again
            elif model.state in (State.LOADING, State.DRAINING):
                await model.wait()
            elif model.state is State.FAILED and model.retry_at > time.monotonic():
                raise model.refusal()
            else:
                model.enter(State.LOADING)
                self._begin(model, self._load(model)).add_done_callback(
                    lambda task: self._load_ended(model, task)
                )

    def _begin(self, model: Model, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        model.task = task = asyncio.get_running_loop().create_task(work)
        return task

    def _load_ended(self, model: Model, task: asyncio.Task[None]) -> None:
        """Whatever came of it is in the model's state afterwards."""
        error = None if task.cancelled() else task.exception()
        if model.task is not task or model.state is not State.LOADING:
            return  # `on_exit` has seen to it
        match error:
            case None if task.cancelled():
                model.on_cancelled()
            case None:
                self.on_ready(model)
                model.on_ready()
                for tier in self._ram_tiers():
                    tier.make_way()  # there is one more to share with
                self.arbiter.spread()  # what the load needed beside the weights is free again
            case PenstockError():
                model.on_refused(error)
            case OSError():  # no descriptors or no memory left for another process
                model.on_refused(InternalError(f"No worker could be started: {error}."))
            case _:
                log.error("the load of %s failed", model.name, exc_info=error)
                model.on_refused(InternalError(f"The load failed by our own fault: {error!r}."))

    async def _load(self, model: Model) -> None:
        """Book, fork, load, book again what was measured. A failure gives every byte back, after
        the process is gone."""
        if (pause_s := model.not_before - time.monotonic()) > 0:
            await asyncio.sleep(pause_s)
        begun = time.monotonic()
        model.files = None
        model.card = await asyncio.to_thread(self._catalog.find, model.name)
        model.files = await asyncio.to_thread(file_marks, model.card.path)
        self.gpus = await asyncio.to_thread(read_gpus)
        plan = self.plan(model.card)
        await self._measure_fork_server()
        async with contextlib.AsyncExitStack() as undo:
            booking = await self.arbiter.take(plan.load_need())
            undo.callback(booking.release)  # of a process that is gone, or was never there
            undo.push_async_callback(end_worker, model)
            grant = MemoryGrant(self.ledger, plan, booking)
            spec = self._order(plan, grant)
            self.events.add(
                "restart" if model.restarting else "load",
                model=model.name,
                waited_s=round(time.monotonic() - begun, 3),
                bytes=grant.total_bytes,
                kv_bytes=grant.granted_kv_bytes,
            )
            worker = await run_to_end(self._birth(model, spec, grant))
            await asyncio.shield(worker.ready)
            if model.worker is not worker:
                raise WorkerLost(f"The process of the model {model.name!r} ended as it was ready.")
            grant.book_measured(worker.client)
            undo.pop_all()

    def _order(self, plan: LoadEstimate, grant: MemoryGrant) -> LoadSpec:
        """What the worker is told: its grant now, and the largest that it may ever get."""
        largest = largest_kv(self.ledger.snapshot(), plan.capacity(), self.arbiter.usages())
        spec = plan.spec(grant.granted_kv_bytes, largest, self._storage)
        return msgspec.structs.replace(spec, yields=bool(self.loaded_models()))

    async def _birth(self, model: Model, spec: LoadSpec, grant: MemoryGrant) -> WorkerHandle:
        with self.grammar_socket(spec.name) as grammars:
            worker = await self._supervisor.start(spec, grammars)
        model.attach_worker(worker, grant)
        return worker

    async def _measure_fork_server(self) -> None:
        """The estimate is much too large for most; the first load should not pay for that."""
        pid = await self._supervisor.launcher.started()
        reading = None if pid is None else await asyncio.to_thread(read_process, pid)
        if reading is not None:
            self.fork_server.measured(reading.anonymous_bytes)

    async def _drain(self, model: Model, grace_s: float, reason: str) -> None:
        worker, begun = model.worker, time.monotonic()
        assert worker is not None
        while model.leases and not model.hurried and model.worker is worker:
            await model.wait()
        if model.worker is not worker:
            return  # it died before
        told = time.monotonic()
        size = 0
        if model.grant is not None:
            size = model.grant.total_bytes
            model.grant.mark_exiting()
        await worker.stop(0.0 if model.hurried else grace_s)
        self.events.add(
            "unload",
            model=model.name,
            reason=reason,
            freed_bytes=size,
            waited_s=round(told - begun, 3),
            settled_s=round(time.monotonic() - told, 3),
        )
        for other in self._models.values():
            if isinstance(other.error, ModelTooLarge | Overloaded):
                other.retry_at = 0.0  # there is more room now
        self.arbiter.spread()
