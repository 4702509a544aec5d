"""Which models are loaded, and who is using them.

A lease is the only way to a model: it loads an absent one, waits for one that is on its way,
replaces a dead worker, and keeps the model until the lease ends. Everything runs on the event
loop, and a decision never has an await in it, so there are no locks. What a load may have and who
makes room for it is `room`'s; what a loaded model holds is its `Holding`'s.

A request whose worker is lost may lease the same model again: the lease then waits for the
restart. It can be hidden from the client as long as `Generation.started` is false.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from penstock.catalog import Card  # noqa: TC001 - a NamedTuple's fields are read at run time
from penstock.errors import InternalError, ModelTooLarge, Overloaded, PenstockError, WorkerLost
from penstock.memory.admission import largest_kv
from penstock.memory.baseline import Baseline
from penstock.memory.gauge import GpuReading, read_gpus, read_process, resolve_device
from penstock.memory.limits import TEMPLATE_BYTES, domain_of
from penstock.server.client import ModelClient  # noqa: TC001
from penstock.server.holding import Holding
from penstock.server.model import Model, State
from penstock.server.plans import ModelPlan, Storage, plan_for
from penstock.server.room import Room
from penstock.server.supervisor import STOP_GRACE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from penstock.catalog import Catalog
    from penstock.config import ModelsSettings
    from penstock.memory.admission import ModelRoom
    from penstock.memory.ledger import Ledger
    from penstock.server.supervisor import Supervisor, WorkerHandle

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
        self.template = Baseline(ledger, "template", TEMPLATE_BYTES)
        self.room = Room(ledger, self.tenants, patience_s)
        self._catalog = catalog
        self._supervisor = supervisor
        self._ledger = ledger
        self.settings = settings
        self._storage = storage
        self._models: dict[str, Model] = {}
        self.gpus: Sequence[GpuReading] = ()  # as last read, at a load or at the start
        self._closed = False

    @contextlib.asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[Lease]:
        """The model, loaded; it stays until the block ends. Raises why it cannot be had."""
        model = await self._find(name)
        worker = await self._ensure_ready(model)
        assert model.card is not None
        model.leases += 1
        try:
            yield Lease(model.card, worker.client)
        finally:
            model.leases -= 1
            model.used_at = time.monotonic()
            model.changed.set()
            self.room.wake()

    async def load(self, name: str) -> None:
        """Have the model ready. Who gives up waiting ends a load that nobody else waits for."""
        model = await self._find(name)
        try:
            await self._ensure_ready(model)
        except asyncio.CancelledError:
            await self._call_off(model)
            raise

    async def unload(self, name: str, grace_s: float = STOP_GRACE_S, *, now: bool = False) -> bool:
        """Let the running requests finish, unless it must be `now`, then end the worker; False if
        there was none. A load that somebody waits for is let finish first."""
        model = self._models.get(name)
        if model is None:
            return False
        if await self._call_off(model):
            return True
        while model.state is State.LOADING:
            await model.wait()
        if model.state is State.READY:
            model.state, model.hurried = State.DRAINING, False
            model.task = asyncio.get_running_loop().create_task(self._drain(model, grace_s))
        elif model.state is not State.DRAINING:
            return False
        if now:
            model.hurried = True
            model.changed.set()
        assert model.task is not None
        await asyncio.shield(model.task)
        return True

    async def _call_off(self, model: Model) -> bool:
        """End a load that nobody waits for; True if there was one."""
        if model.state is not State.LOADING or model.waiting or model.task is None:
            return False
        model.task.cancel()
        await asyncio.wait([model.task])
        if not model.task.cancelled():
            return False
        model.abandon()
        return True

    async def pin(self, name: str, *, pinned: bool) -> None:
        """Keep a model, or no longer; until the server ends or the settings say otherwise."""
        (await self._find(name)).pinned = pinned
        self.room.wake()

    def reconfigure(self, settings: ModelsSettings) -> None:
        """These hold from now on; a model that must be loaded anew for them is `upkeep`'s."""
        before, self.settings = self.settings, settings
        for model in self._models.values():
            own = settings.settings(model.name)
            if own.pinned != before.settings(model.name).pinned:
                model.pinned = own.pinned
            if model.holding is not None:
                model.holding.adopt(own)
        self.room.wake()

    def snapshot(self) -> list[dict[str, object]]:
        """One row per model that is or was wanted, for `penstock ps` and the dashboard."""
        return [model.row() for model in self._models.values()]

    def ready_clients(self) -> dict[str, ModelClient]:
        """The models that answer now, by name, for probes and metrics."""
        return {name: model.client for name, model in self.tenants().items()}

    def tenants(self) -> dict[str, Model]:
        """The loaded models, as those whose memory can move."""
        return {
            model.name: model
            for model in self._models.values()
            if model.state is State.READY and model.worker is not None and model.worker.alive
        }

    def workers(self) -> dict[str, int]:
        """The process ids of all workers there are, loading and ending ones too."""
        return {
            model.name: model.worker.pid
            for model in self._models.values()
            if model.worker is not None
        }

    async def plan(self, card: Card) -> ModelPlan:
        """How a model would be loaded: device and dtype resolved."""
        return self._plan(card, self.gpus)

    async def room_of(self, card: Card) -> ModelRoom:
        """A model as admission sees it, loaded or not."""
        if (model := self.tenants().get(card.name)) is not None and model.holding is not None:
            return model.holding.room()
        return (await self.plan(card)).room()

    async def grow(self, card: Card, kv_bytes: int) -> None:
        """Try to give a loaded model so much KV, at the cost of idle ones."""

        def now() -> ModelRoom | None:
            model = self.tenants().get(card.name)
            return None if model is None or model.holding is None else model.holding.room()

        await self.room.grow(now, card.name, kv_bytes)

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
        model = Model(card.name, self.settings.settings(card.name).pinned)
        model.unload_idle = lambda: self._unload_idle(model)
        return self._models.setdefault(card.name, model)

    async def _unload_idle(self, model: Model) -> None:
        """For another model's sake: not if someone came meanwhile."""
        if model.state is State.READY and not model.leases:
            log.info("%s is idle and is unloaded", model.name)
            await self.unload(model.name)

    async def _ensure_ready(self, model: Model) -> WorkerHandle:
        """Returns in the same turn of the loop in which the model was seen to be ready."""
        model.waiting += 1
        try:
            return await self._until_ready(model)
        finally:
            model.waiting -= 1

    async def _until_ready(self, model: Model) -> WorkerHandle:
        while True:
            if self._closed:
                raise Overloaded("The server is shutting down.", retry_after_s=5)
            if model.state is State.READY:
                assert model.worker is not None
                if model.worker.alive:
                    return model.worker
                await model.wait()  # for `bury`: this is between the first sign of a death and it
            elif model.state in (State.LOADING, State.DRAINING):
                await model.wait()
            elif model.state is State.FAILED and model.retry_at > time.monotonic():
                raise model.refusal()
            else:
                model.state = State.LOADING
                model.task = asyncio.get_running_loop().create_task(self._load(model))

    async def _load(self, model: Model) -> None:
        """One attempt; whatever comes of it is in the model's state afterwards."""
        try:
            if (pause_s := model.not_before - time.monotonic()) > 0:
                await asyncio.sleep(pause_s)
            await self._start(model)
        except WorkerLost:
            pass  # `bury` has seen to it
        except PenstockError as error:
            model.refuse(error)
        except OSError as error:  # no descriptors or no memory left for another process
            model.refuse(InternalError(f"No worker could be started: {error}."))
        else:
            model.refusals = 0
            model.used_at = time.monotonic()
            model.enter(State.READY)
            self.room.spread()  # what the load needed beside the weights is free again
            ready, holding = model.client.ready, model.holding
            assert holding is not None
            log.info(
                "%s is ready on %s after %.1f s: %d tokens of KV",
                model.name,
                ready.device,
                ready.load_s,
                holding.room().tokens_in(holding.granted_kv_bytes),
            )

    async def _start(self, model: Model) -> None:
        """Book, fork, load, book again what was measured. A failure gives every byte back, after
        the process is gone."""
        model.card = await asyncio.to_thread(self._catalog.find, model.name)
        self.gpus = await asyncio.to_thread(read_gpus)
        plan = self._plan(model.card, self.gpus)
        await self._measure_template()
        async with contextlib.AsyncExitStack() as undo:
            booking = await self.room.take(plan.load_need())
            undo.callback(booking.release)
            holding = model.holding = Holding(self._ledger, plan, booking)
            largest = largest_kv(self._ledger.snapshot(), plan.room(), self.room.residents())
            spec = plan.spec(holding.granted_kv_bytes, largest, self._storage)
            worker = model.worker = await self._supervisor.start(spec)
            undo.push_async_callback(worker.stop)
            worker.ended.add_done_callback(lambda _: model.bury())
            await asyncio.shield(worker.ready)
            holding.move_in(worker.client)
            undo.pop_all()

    def _plan(self, card: Card, gpus: Sequence[GpuReading]) -> ModelPlan:
        settings = self.settings.settings(card.name)
        device = resolve_device(settings.device, gpus)
        limit_bytes = self._ledger.snapshot()[domain_of(device)].limit_bytes
        return plan_for(card, settings, device, limit_bytes)

    async def _measure_template(self) -> None:
        """The estimate is much too large for most; the first load should not pay for that."""
        template = await self._supervisor.template()
        reading = await asyncio.to_thread(read_process, template.pid)
        if reading is not None:
            self.template.measured(reading.anonymous_bytes)

    async def _drain(self, model: Model, grace_s: float) -> None:
        while model.leases and not model.hurried:
            await model.wait()
        grace_s = 0.0 if model.leases else grace_s
        assert model.worker is not None
        if model.holding is not None:
            model.holding.settle()
        await model.worker.stop(grace_s)
        for other in self._models.values():
            if isinstance(other.error, ModelTooLarge | Overloaded):
                other.retry_at = 0.0  # there is more room now
        self.room.spread()
