"""One model's life in this server, and the memory that it holds and can give back.

    absent -> loading -> ready -> draining -> absent,  failed(reason, retry_at)

It knows its worker and what that holds; when to load and whom to unload is decided in `residency`
and `memory_arbiter`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from penstock.errors import Overloaded, PenstockError, WorkerLost, by_code
from penstock.memory.events import Events
from penstock.memory.eviction import ModelUsage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from penstock.catalog import Card
    from penstock.catalog.scan import Marks
    from penstock.config import ModelSettings
    from penstock.server.processes.supervisor import WorkerHandle
    from penstock.server.processes.worker_client import ModelClient
    from penstock.server.residency.memory_grant import MemoryGrant

log = logging.getLogger(__name__)

T = TypeVar("T")

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


@dataclass(slots=True)
class Model:
    """One model's place in its life.

    LOADING ends with `on_ready`, `on_refused`, `on_cancelled` or `on_exit`; READY with `on_exit` or
    DRAINING, which ends with `on_exit`; FAILED when its time has passed, or with `reset_failures`.
    """

    name: str
    pinned: bool = False
    events: Events = field(default_factory=Events)
    state: State = State.ABSENT
    card: Card | None = None
    worker: WorkerHandle | None = None
    grant: MemoryGrant | None = None
    unload_idle: Callable[[], Awaitable[None]] | None = None
    task: asyncio.Task[None] | None = None  # the load or the drain in progress
    leases: int = 0
    waiting: int = 0  # leases that are not given yet
    hurried: bool = False  # its unload does not wait for the leases to end
    holds_new_leases: bool = False  # gives no new lease: a load waits for what it holds
    cancels: int = 0  # of loads, by the user
    load_cancelled: bool = False  # the one in progress, by anyone
    used_at: float = field(default_factory=time.monotonic)
    keep_alive_s: float | None = None  # as a client wants it, until the model is unloaded
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ready_at: float = 0.0
    # Its files as the latest load found them; None: it has not come so far.
    files: Marks | None = None
    deaths: deque[float] = field(default_factory=lambda: deque(maxlen=DEATHS_ALLOWED))
    not_before: float = 0.0  # of the next load, after deaths
    restarting: bool = False  # the next load is one
    circuit_open: bool = False
    refusals: int = 0  # in a row
    error: PenstockError | None = None  # why it is FAILED
    retry_at: float = 0.0  # when FAILED may be tried again
    _rests_since: float = 0.0

    @property
    def client(self) -> ModelClient:
        """The way to the worker there is."""
        assert self.worker is not None
        return self.worker.client

    @property
    def idle(self) -> bool:
        """Nobody uses it, nor is about to: who has waited for its load takes the lease a moment
        after it is ready. Those who wait while it takes no new leases do not count."""
        coming = self.waiting and not self.holds_new_leases
        return not self.leases and not coming and not self.client.open_requests

    def ttl_s(self, settings: ModelSettings) -> float | None:
        """How long it stays when nobody uses it; None: until its memory is needed. What a client
        wants can only shorten what the settings allow."""
        wanted = [
            keep_s for keep_s in (settings.ttl or None, self.keep_alive_s) if keep_s is not None
        ]
        shortest = min(wanted, default=math.inf)
        return None if math.isinf(shortest) else shortest

    # --- as an `Evictable` of the memory arbiter ---

    def usage(self) -> ModelUsage:
        """What it holds and could give."""
        assert self.grant is not None
        grant, status = self.grant, self.client.status
        used = 0
        if status is not None and self.client.open_requests:
            used = status.kv_capacity_bytes - status.kv_free_bytes
        return ModelUsage(
            name=self.name,
            domain=grant.domain,
            fixed_bytes=grant.fixed_bytes,
            kv_bytes=grant.kv_bytes,
            kv_used_bytes=min(used, grant.kv_bytes),
            kv_min_bytes=min(grant.kv_min_bytes, grant.kv_bytes),
            idle=self.idle,
            pinned=self.pinned,
            used_at=self.used_at,
            served=time.monotonic() - self.ready_at >= self.client.ready.load_s,
        )

    @property
    def kv_max_bytes(self) -> int:
        """More KV than this is of no use to it."""
        assert self.grant is not None
        return self.grant.kv_max_bytes

    def grow_kv(self, kv_bytes: int) -> None:
        """Book and grant so much KV; `OutOfBudget` if it does not fit."""
        assert self.grant is not None
        self.grant.grow(kv_bytes)

    async def shrink_kv(self, kv_bytes: int) -> None:
        """Have it hold no more than so much KV."""
        assert self.grant is not None
        await self.grant.shrink(kv_bytes)

    def hold_new_leases(self, on: bool) -> None:
        """Give no new lease, or give them again."""
        if self.holds_new_leases and not on:
            self.changed.set()
        self.holds_new_leases = on

    async def unload(self) -> None:
        """End it, if it is still idle."""
        assert self.unload_idle is not None
        await self.unload_idle()

    def rested(self, after_s: float) -> bool:
        """Whether it has been idle for so long; true once for each time it rests."""
        if not self.idle or self._rests_since == self.used_at:
            return False
        if time.monotonic() - self.used_at < after_s:
            return False
        self._rests_since = self.used_at
        return True

    # --- its life ---

    def enter(self, state: State) -> None:
        """Change the state and wake whoever waits for a change."""
        self.state = state
        self.holds_new_leases = self.load_cancelled = False
        self.changed.set()

    async def wait(self) -> None:
        """Until something changes."""
        self.changed.clear()
        await self.changed.wait()

    def attach_worker(self, worker: WorkerHandle, grant: MemoryGrant) -> None:
        """A process is loading it; what it holds comes back when the process is gone."""
        self.worker, self.grant = worker, grant
        worker.client.on_notice = lambda words: self.events.add(
            "cache", model=self.name, words=words
        )
        worker.ended.add_done_callback(lambda _: self.on_exit(worker))

    def on_ready(self) -> None:
        """The load is done."""
        assert self.grant is not None
        self.refusals = 0
        self.restarting = False
        self.keep_alive_s = None
        self.used_at = self.ready_at = time.monotonic()
        ready, capacity = self.client.ready, self.grant.capacity()
        self.events.add(
            "loaded",
            model=self.name,
            pid=ready.pid,
            load_s=round(ready.load_s, 3),
            phases=ready.phases,
            bytes=self.grant.total_bytes,
            kv_bytes=self.grant.granted_kv_bytes,
            context=capacity.tokens_in(self.grant.granted_kv_bytes),
            control_group=ready.outer_cap,
        )
        self._close_circuit()
        self.enter(State.READY)

    def on_exit(self, worker: WorkerHandle) -> None:
        """The worker has ended: by our wish while draining, or by itself."""
        assert worker is self.worker
        ending, held = worker.ended.result(), self.grant
        size = 0 if held is None else held.total_bytes
        self.worker = None
        self._give_back()
        if worker.end_expected:
            # At the end of a load the refusal decides what comes next.
            if self.state is State.DRAINING:
                self.enter(State.ABSENT)
            return
        now = time.monotonic()
        self.deaths.append(now)
        recent = [death for death in self.deaths if now - death < DEATH_WINDOW_S]
        self.restarting = True
        self.events.add(
            "death",
            model=self.name,
            pid=worker.pid,
            state=self.state.value,
            freed_bytes=size,
            deaths=len(recent),
            **ending.row(),
        )
        if len(recent) < DEATHS_ALLOWED:
            self.not_before = now + DEATH_PAUSE_S * (len(recent) - 1)
            self.enter(State.ABSENT)
            return
        self.retry_at = recent[0] + DEATH_WINDOW_S
        self.error = WorkerLost(
            f"The process of the model {self.name!r} has ended {len(recent)} times in "
            f"{now - recent[0]:.0f} s, the last time so: {ending.words}."
        )
        self.circuit_open = True
        retry_in_s = round(self.retry_at - now, 1)
        self.events.add(
            "circuit opened", model=self.name, deaths=len(recent), retry_in_s=retry_in_s
        )
        self.enter(State.FAILED)

    def on_refused(self, error: PenstockError) -> None:
        """The load came to the conclusion that it cannot be done, at least now."""
        self._give_back()
        pause_s = min(REFUSAL_PAUSE_S * 2**self.refusals, REFUSAL_PAUSE_MAX_S)
        self.refusals += 1
        self.retry_at = time.monotonic() + pause_s
        self.error = error
        log.warning("%s cannot be loaded: %s", self.name, error.message)
        row = {**(error.numbers or {}), "code": error.code, "reason": error.message}
        self.events.add("load failed", model=self.name, retry_in_s=pause_s, **row)
        self.enter(State.FAILED)

    def cancel_load(self) -> None:
        """End the load, if there is one; its process is seen to in peace, so only once."""
        if self.state is State.LOADING and self.task is not None and not self.load_cancelled:
            self.load_cancelled = True  # `cancelling()` would count time-outs inside it, too
            self.task.cancel()

    def on_cancelled(self) -> None:
        """The load was cancelled."""
        self._give_back()
        self.events.add("load cancelled", model=self.name)
        self.enter(State.ABSENT)

    def reset_failures(self) -> None:
        """What went wrong before is no reason any more: the files or the settings have changed."""
        self.retry_at = self.not_before = 0.0
        self.refusals = 0
        self.deaths.clear()
        self._close_circuit()

    def _close_circuit(self) -> None:
        if self.circuit_open:
            self.circuit_open = False
            self.events.add("circuit closed", model=self.name)

    def _give_back(self) -> None:
        """The process is gone: so are its bytes."""
        if self.grant is not None:
            self.grant.release()
            self.grant = None

    def cancelled(self) -> PenstockError:
        """What those are told who waited for a load that the user has cancelled."""
        return Overloaded(f"The load of the model {self.name!r} was cancelled.", retry_after_s=1)

    def refusal(self) -> PenstockError:
        """The stored error, new for each who asks, with the time left."""
        error = self.error
        assert error is not None
        # By its code, since a special kind may be made of other things than a sentence.
        return by_code(error.code)(
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
            "bytes": self.grant.total_bytes if self.grant else 0,
            "context": None,
            "leases": self.leases,
            "pinned": self.pinned,
            "idle_s": 0.0 if self.leases else round(now - self.used_at, 1),
        }
        if self.state is State.LOADING and self.worker is None:
            row["progress"] = {"phase": "room", "done_bytes": 0, "total_bytes": 0}
        if self.worker is not None:
            row["pid"] = self.worker.pid
            if self.state is State.LOADING and (progress := self.worker.progress) is not None:
                row["progress"] = {
                    "phase": progress.phase,
                    "done_bytes": progress.done_bytes,
                    "total_bytes": progress.total_bytes,
                }
        if self.state is State.READY and self.worker is not None:
            assert self.grant is not None
            ready, capacity = self.worker.client.ready, self.grant.capacity()
            context = capacity.tokens_in(self.grant.granted_kv_bytes)
            row |= capacity.kv.figures(context) | {
                "context": context,
                "device": ready.device,
                "dtype": ready.dtype,
                "kv_dtype": ready.kv_dtype,
                "kv_bytes": self.grant.granted_kv_bytes,
                "kv_min_bytes": self.grant.kv_min_bytes,
                "kv_tokens": capacity.all_tokens_in(self.grant.granted_kv_bytes),
                "weight_bytes": ready.weight_bytes,
                "step_bytes": ready.step_bytes,
                "measured_step_bytes": max(point.bytes for point in ready.cost.measured),
                "requests": self.worker.client.open_requests,
            }
        if self.state is State.FAILED and self.error is not None:
            row["reason"] = self.error.message
            row["retry_in_s"] = round(max(self.retry_at - now, 0.0), 1)
        return row


async def end_worker(model: Model) -> None:
    """End the process of a load that failed, if there is one; returns when it is gone."""
    if model.worker is not None:
        await run_to_end(model.worker.stop())


async def run_to_end(work: Coroutine[None, None, T]) -> T:
    """What comes of it; who is cancelled meanwhile goes on only when it is done."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
