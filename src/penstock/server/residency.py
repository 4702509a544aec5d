"""Which models are loaded, and who is using them.

    absent -> loading -> ready -> draining -> absent,  failed(reason, retry_at)

A lease is the only way to a model: it loads an absent one, waits for one that is on its way,
replaces a dead worker, and keeps the model until the lease ends. Everything runs on the event
loop, and a decision never has an await in it, so there are no locks. Knows memory only through
the plan of each load.

A request whose worker is lost may lease the same model again: the lease then waits for the
restart. It can be hidden from the client as long as `Generation.started` is false.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from penstock.catalog import Card  # noqa: TC001 - a NamedTuple's fields are read at run time
from penstock.catalog.weights import ITEM_BYTES
from penstock.errors import InternalError, ModelTooLarge, Overloaded, PenstockError, WorkerLost
from penstock.memory.gauge import GpuReading, read_gpus, resolve_device
from penstock.memory.limits import LoadNeed, LoadPlan, domain_of, plan_load, step_reserve
from penstock.server.client import ModelClient  # noqa: TC001
from penstock.server.supervisor import STOP_GRACE_S
from penstock.wire import LoadSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from penstock.catalog import Catalog
    from penstock.config import ModelSettings, ModelsSettings
    from penstock.server.supervisor import Supervisor, WorkerHandle

log = logging.getLogger(__name__)

# A worker that dies is replaced at once, the next one after a pause, and after the third death
# within the window the model is left alone until the window has passed.
DEATHS_ALLOWED = 3
DEATH_WINDOW_S = 300.0
DEATH_PAUSE_S = 1.0
# A load that is refused is not tried again before this, doubled for each further refusal.
REFUSAL_PAUSE_S = 1.0
REFUSAL_PAUSE_MAX_S = 60.0


class State(Enum):
    """Where a model is in its life."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


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
        limits: Mapping[str, int],  # bytes per domain, from `memory.limits.resolve_limits`
        settings: ModelsSettings,
    ) -> None:
        self._catalog = catalog
        self._supervisor = supervisor
        self._limits = limits
        self._settings = settings
        self._models: dict[str, _Model] = {}
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

    async def unload(self, name: str, grace_s: float = STOP_GRACE_S) -> bool:
        """Let the running requests finish, then end the worker; False if there was none."""
        model = self._models.get(name)
        if model is None:
            return False
        while model.state is State.LOADING:
            await model.wait()
        if model.state is State.READY:
            model.state = State.DRAINING
            model.task = asyncio.get_running_loop().create_task(self._drain(model, grace_s))
        elif model.state is not State.DRAINING:
            return False
        assert model.task is not None
        await asyncio.shield(model.task)
        return True

    def snapshot(self) -> list[dict[str, object]]:
        """One row per model that is or was wanted, for `penstock ps` and the dashboard."""
        return [model.row() for model in self._models.values()]

    def ready_clients(self) -> dict[str, ModelClient]:
        """The models that answer now, by name, for probes and metrics."""
        return {
            model.name: model.worker.client
            for model in self._models.values()
            if model.state is State.READY and model.worker is not None and model.worker.alive
        }

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

    async def _find(self, name: str) -> _Model:
        if (model := self._models.get(name)) is not None:
            return model
        card = await asyncio.to_thread(self._catalog.find, name)
        return self._models.setdefault(card.name, _Model(card.name))

    async def _ensure_ready(self, model: _Model) -> WorkerHandle:
        """Returns in the same turn of the loop in which the model was seen to be ready."""
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

    async def _load(self, model: _Model) -> None:
        """One attempt; whatever comes of it is in the model's state afterwards."""
        try:
            if (pause_s := model.not_before - time.monotonic()) > 0:
                await asyncio.sleep(pause_s)
            model.card = await asyncio.to_thread(self._catalog.find, model.name)
            gpus = await asyncio.to_thread(read_gpus)
            spec, model.plan = self._plan(model.card, gpus)
            model.worker = await self._supervisor.start(spec)
            model.worker.ended.add_done_callback(lambda _: model.bury())
            ready = await asyncio.shield(model.worker.ready)
        except WorkerLost:
            pass  # `bury` has seen to it
        except PenstockError as error:
            if model.worker is not None:
                await model.worker.stop()
            model.refuse(error)
        except OSError as error:  # no descriptors or no memory left for another process
            model.refuse(InternalError(f"No worker could be started: {error}."))
        else:
            model.refusals = 0
            model.used_at = time.monotonic()
            model.enter(State.READY)
            log.info(
                "%s is ready on %s after %.1f s: %d tokens of KV",
                model.name,
                ready.device,
                ready.load_s,
                ready.kv_tokens,
            )

    def _plan(self, card: Card, gpus: Sequence[GpuReading]) -> tuple[LoadSpec, LoadPlan]:
        settings = self._settings.settings(card.name)
        device = resolve_device(settings.device, gpus)
        dtype = serving_dtype(settings.dtype, card.dtype, device)
        held = [model.plan for model in self._models.values() if model.plan is not None]
        plan = plan_load(_need(card, settings, device, dtype), self._limits, held)
        spec = LoadSpec(
            name=card.name,
            path=str(card.path),
            device=device,
            dtype=dtype,
            memory_bytes=plan.kv_bytes,
            max_context=settings.max_context,
            step_tokens=settings.step_tokens,
            step_sequences=settings.step_sequences,
            step_target_s=settings.step_target_s,
            threads=settings.threads,
            trust_remote_code=settings.trust_remote_code,
        )
        return spec, plan

    async def _drain(self, model: _Model, grace_s: float) -> None:
        while model.leases:
            await model.wait()
        assert model.worker is not None
        await model.worker.stop(grace_s)
        for other in self._models.values():
            if isinstance(other.error, ModelTooLarge):
                other.retry_at = 0.0  # there is more room now


@dataclass(slots=True)
class _Model:
    """One model's place in its life; `bury` and `refuse` are the two ways a worker goes wrong."""

    name: str
    state: State = State.ABSENT
    card: Card | None = None
    worker: WorkerHandle | None = None
    plan: LoadPlan | None = None
    task: asyncio.Task[None] | None = None  # the load or the drain in progress
    leases: int = 0
    used_at: float = field(default_factory=time.monotonic)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    deaths: deque[float] = field(default_factory=lambda: deque(maxlen=DEATHS_ALLOWED))
    not_before: float = 0.0  # of the next load, after deaths
    refusals: int = 0  # in a row
    error: PenstockError | None = None  # why it is FAILED
    retry_at: float = 0.0  # when FAILED may be tried again

    def enter(self, state: State) -> None:
        """Change the state and wake whoever waits for a change."""
        self.state = state
        self.changed.set()

    async def wait(self) -> None:
        """Until something changes."""
        self.changed.clear()
        await self.changed.wait()

    def bury(self) -> None:
        """The worker has ended: by our wish while draining, or by itself."""
        assert self.worker is not None
        worker, self.worker, self.plan = self.worker, None, None
        if worker.end_expected:
            # At the end of a load the refusal decides what comes next.
            if self.state is State.DRAINING:
                self.enter(State.ABSENT)
            return
        now = time.monotonic()
        self.deaths.append(now)
        recent = [death for death in self.deaths if now - death < DEATH_WINDOW_S]
        if len(recent) < DEATHS_ALLOWED:
            self.not_before = now + DEATH_PAUSE_S * (len(recent) - 1)
            self.enter(State.ABSENT)
            return
        self.retry_at = recent[0] + DEATH_WINDOW_S
        self.error = WorkerLost(
            f"The process of the model {self.name!r} has ended {len(recent)} times in "
            f"{now - recent[0]:.0f} s, the last time so: {worker.ended.result()}."
        )
        self.enter(State.FAILED)

    def refuse(self, error: PenstockError) -> None:
        """The load came to the conclusion that it cannot be done, at least now."""
        self.worker, self.plan = None, None
        pause_s = min(REFUSAL_PAUSE_S * 2**self.refusals, REFUSAL_PAUSE_MAX_S)
        self.refusals += 1
        self.retry_at = time.monotonic() + pause_s
        self.error = error
        log.warning("%s cannot be loaded: %s", self.name, error.message)
        self.enter(State.FAILED)

    def refusal(self) -> PenstockError:
        """The stored error, new for each who asks, with the time left."""
        error = self.error
        assert error is not None
        return type(error)(
            error.message,
            param=error.param,
            retry_after_s=max(self.retry_at - time.monotonic(), 0.0),
            numbers=error.numbers,
        )

    def row(self) -> dict[str, object]:
        """What `ps` shows."""
        now = time.monotonic()
        row: dict[str, object] = {
            "name": self.name,
            "state": self.state.value,
            "pid": None,
            "bytes": self.plan.total_bytes if self.plan else 0,
            "context": None,
            "leases": self.leases,
            "idle_s": 0.0 if self.leases else round(now - self.used_at, 1),
        }
        if self.worker is not None:
            row["pid"] = self.worker.pid
            if self.state is State.LOADING and (progress := self.worker.progress) is not None:
                row["progress"] = {
                    "phase": progress.phase,
                    "done_bytes": progress.done_bytes,
                    "total_bytes": progress.total_bytes,
                }
        if self.state is State.READY and self.worker is not None:
            ready = self.worker.client.ready
            row |= {
                "context": ready.context,
                "device": ready.device,
                "dtype": ready.dtype,
                "kv_tokens": ready.kv_tokens,
                "weight_bytes": ready.weight_bytes,
                "requests": self.worker.client.open_requests,
            }
        if self.state is State.FAILED and self.error is not None:
            row["reason"] = self.error.message
            row["retry_in_s"] = round(max(self.retry_at - now, 0.0), 1)
        return row


def serving_dtype(wanted: str, stored: str, device: str) -> str:
    """`auto`: float32 on a CPU, where narrow types are slow; on a GPU a 16-bit type."""
    if wanted != "auto":
        return wanted
    if device == "cpu":
        return "float32"
    return stored if stored in {"bfloat16", "float16"} else "bfloat16"


def _need(card: Card, settings: ModelSettings, device: str, dtype: str) -> LoadNeed:
    context = min(card.context, settings.max_context or card.context)
    return LoadNeed(
        name=card.name,
        domain=domain_of(device),
        weight_bytes=card.bytes_in_memory(dtype),
        kv_bytes_per_token=card.kv_bytes_per_token(ITEM_BYTES[dtype]),
        context=context,
        step_bytes=step_reserve(
            min(settings.step_tokens, context),
            settings.step_sequences,
            card.hidden_size,
            card.vocab_size,
            ITEM_BYTES[dtype],
        ),
        kv_bytes=settings.kv_bytes,
    )
