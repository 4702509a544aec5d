"""Which models are loaded, and who is using them.

A lease is the only way to a model: it loads an absent one, waits for one that is on its way,
replaces a dead worker, and keeps the model until the lease ends. Everything runs on the event
loop, and a decision never has an await in it, so there are no locks. What a load may have and who
makes room for it is `room`'s; what a loaded model holds is its `Holding`'s.

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
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from penstock.catalog import Card  # noqa: TC001 - a NamedTuple's fields are read at run time
from penstock.catalog.scan import file_marks
from penstock.errors import InternalError, ModelTooLarge, Overloaded, PenstockError, WorkerLost
from penstock.memory.admission import largest_kv
from penstock.memory.baseline import Baseline
from penstock.memory.events import Events
from penstock.memory.gauge import GpuReading, read_gpus, read_process, resolve_device
from penstock.memory.limits import TEMPLATE_BYTES, domain_of
from penstock.server.client import ModelClient  # noqa: TC001
from penstock.server.holding import Holding
from penstock.server.model import Model, State
from penstock.server.plans import ModelPlan, Storage, plan_for
from penstock.server.ram_tier import RamTier
from penstock.server.room import Room
from penstock.server.supervisor import STOP_GRACE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Sequence

    from penstock.catalog import Catalog
    from penstock.config import ModelsSettings
    from penstock.memory.admission import ModelRoom
    from penstock.memory.ledger import Ledger
    from penstock.server.room import Tenant
    from penstock.server.supervisor import Supervisor, WorkerHandle
    from penstock.wire import LoadSpec

log = logging.getLogger(__name__)

T = TypeVar("T")


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
        self.template = Baseline(ledger, "template", TEMPLATE_BYTES)
        self.room = Room(ledger, self.memory_tenants, patience_s)
        self._catalog = catalog
        self._supervisor = supervisor
        self.ledger = ledger
        self.settings = settings
        self._storage = storage
        self._models: dict[str, Model] = {}
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
            self.room.wake()

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
            if model.state is State.FAILED and own != before.settings(model.name):
                model.forgive()
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

    def memory_tenants(self) -> dict[str, Tenant]:
        """All who have memory to give: the loaded models, and what those on a GPU keep in RAM."""
        tenants: dict[str, Tenant] = dict(self.tenants())
        for tier in self._ram_tiers():
            tenants[tier.name] = tier
        return tenants

    def _ram_tiers(self) -> list[RamTier]:
        holdings = {name: model.holding for name, model in self.tenants().items()}
        elsewhere = {n: h for n, h in holdings.items() if h is not None and h.domain != "ram"}
        share = self._storage.tier_bytes // max(1, len(elsewhere))
        return [RamTier(name, holding, share) for name, holding in elsewhere.items()]

    def workers(self) -> dict[str, WorkerHandle]:
        """All worker processes there are, loading and ending ones too."""
        return {
            model.name: model.worker for model in self._models.values() if model.worker is not None
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

        begun, before = time.monotonic(), now()
        await self.room.grow(now, card.name, kv_bytes)
        if before is not None and (after := now()) is not None:
            was, has = before.kv_now_bytes or 0, after.kv_now_bytes or 0
            if has > was:
                took_s = round(time.monotonic() - begun, 4)
                self.events.add(
                    "kv grown", model=card.name, kv_bytes=has, was_bytes=was, took_s=took_s
                )

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
            model.forgive()

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
                if model.worker.alive and not model.stands_back:
                    return model.worker
                await model.wait()  # for `bury`, or until it need not stand back
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
            return  # `bury` has seen to it
        match error:
            case None if task.cancelled():
                model.give_up()
            case None:
                model.settle_in()
                for tier in self._ram_tiers():
                    tier.make_way()  # there is one more to share with
                self.room.spread()  # what the load needed beside the weights is free again
            case PenstockError():
                model.refuse(error)
            case OSError():  # no descriptors or no memory left for another process
                model.refuse(InternalError(f"No worker could be started: {error}."))
            case _:
                log.error("the load of %s failed", model.name, exc_info=error)
                model.refuse(InternalError(f"The load failed by our own fault: {error!r}."))

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
        plan = self._plan(model.card, self.gpus)
        await self._measure_template()
        booking = await self.room.take(plan.load_need())
        holding = Holding(self.ledger, plan, booking)
        largest = largest_kv(self.ledger.snapshot(), plan.room(), self.room.residents())
        spec = plan.spec(holding.granted_kv_bytes, largest, self._storage)
        spec = msgspec.structs.replace(spec, yields=bool(self.tenants()))
        self.events.add(
            "restart" if model.restarting else "load",
            model=model.name,
            waited_s=round(time.monotonic() - begun, 3),
            bytes=holding.total_bytes,
            kv_bytes=holding.granted_kv_bytes,
        )
        try:
            worker = await _to_its_end(self._birth(model, spec, holding))
            await asyncio.shield(worker.ready)
            if model.worker is not worker:
                raise WorkerLost(f"The process of the model {model.name!r} ended as it was ready.")
            holding.move_in(worker.client)
        except BaseException:
            if model.worker is not None:
                await _to_its_end(model.worker.stop())
            booking.release()  # of a process that is gone, or was never there
            raise

    async def _birth(self, model: Model, spec: LoadSpec, holding: Holding) -> WorkerHandle:
        worker = await self._supervisor.start(spec)
        model.move_in(worker, holding)
        return worker

    def _plan(self, card: Card, gpus: Sequence[GpuReading]) -> ModelPlan:
        settings = self.settings.settings(card.name)
        device = resolve_device(settings.device, gpus)
        limit_bytes = self.ledger.snapshot()[domain_of(device)].limit_bytes
        return plan_for(card, settings, device, limit_bytes)

    async def _measure_template(self) -> None:
        """The estimate is much too large for most; the first load should not pay for that."""
        template = await self._supervisor.template()
        reading = await asyncio.to_thread(read_process, template.pid)
        if reading is not None:
            self.template.measured(reading.anonymous_bytes)

    async def _drain(self, model: Model, grace_s: float, reason: str) -> None:
        worker, begun = model.worker, time.monotonic()
        assert worker is not None
        while model.leases and not model.hurried and model.worker is worker:
            await model.wait()
        if model.worker is not worker:
            return  # it died before
        told = time.monotonic()
        size = 0
        if model.holding is not None:
            size = model.holding.total_bytes
            model.holding.settle()
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
        self.room.spread()


async def _to_its_end(work: Coroutine[None, None, T]) -> T:
    """What comes of it; who is cancelled meanwhile goes on only when it is done."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
