"""Residency under everything that can happen to it, in any order, without a process.

The real `Residency`, `MemoryArbiter`, `Model`, `MemoryGrant` and `Ledger` on a loop in virtual
time. The rules are the world around them: requests come, leave and end, processes are born or not,
become ready, refuse, die, answer late, are reaped late; users unload, pin and repair; others take
memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.catalog import Card
from penstock.catalog.kv_formats import KvLayers
from penstock.catalog.weights import Weights
from penstock.config import ModelsSettings
from penstock.errors import ModelTooLarge, ModelUnusable, Overloaded, PenstockError, WorkerLost
from penstock.memory.admission import owner_of
from penstock.memory.cost import GroupCost, KvCost, Measured, fit
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger, Purpose
from penstock.memory.limits import MIB
from penstock.server.processes.supervisor import STOP_GRACE_S, TERM_GRACE_S, Ending
from penstock.server.processes.worker_client import ModelClient, WorkerStream
from penstock.server.residency import model as model_module
from penstock.server.residency import residency as residency_module
from penstock.server.residency.load_estimate import Storage
from penstock.server.residency.model import State
from penstock.server.residency.residency import Residency
from penstock.testing.virtual_time import VirtualLoop
from penstock.wire import Freed, Grant, LoadSpec, Ready, Sampling, Shed, Status, Step, Submit

if TYPE_CHECKING:
    from penstock.wire import ToWorker

NAMES = ("a", "b", "c", "d")
TOKEN = 64 << 10  # KV bytes
BLOCK = 16
STEP = 2 * MIB
PROCESS = 24 * MIB
PATIENCE_S = 600.0

T = TypeVar("T")


def card(name: str) -> Card:
    return Card(
        name=name,
        path=Path("/models") / name,
        kind="generate",
        architecture="LlamaForCausalLM",
        model_type="llama",
        weights=Weights(
            MIB << (2 * NAMES.index(name)), 4 * MIB << (2 * NAMES.index(name)), "float32", 0
        ),
        context=2048,
        layers=("full_attention",),
        kv_layers=(KvLayers(None, TOKEN // 4, 16),),
        hidden_size=64,
        vocab_size=512,
        eos_token_ids=(),
        sampling_defaults={},
        source="test",
    )


class Worker:
    """A process that does what the rules say, and knows what it really holds."""

    def __init__(self, world: World, spec: LoadSpec) -> None:
        self.world = world
        self.spec = spec
        self.pid = world.next_pid = world.next_pid + 1
        self.client = ModelClient(spec.name, self.send)
        self.progress = None
        self.ready: asyncio.Future[Ready] = world.loop.create_future()
        self.ended: asyncio.Future[Ending] = world.loop.create_future()
        self.alive = True
        self.end_expected = False
        self.words_heard = 0
        self.orders: list[Grant | Shed] = []
        self.kv = spec.memory_bytes  # what it may be using
        self.fresh = True
        self.busy: dict[int, int] = {}  # KV of its requests

    def send(self, message: ToWorker) -> None:
        match message:
            case Grant() | Shed():
                self.orders.append(message)
                if isinstance(message, Grant):
                    # From now on it may. The first comes before any request could use the rest.
                    self.kv = message.kv_bytes if self.fresh else max(self.kv, message.kv_bytes)
                self.fresh = False
            case Submit():
                self.busy[message.id] = TOKEN * len(message.prompt)
                self.fresh = False
            case _:
                self.busy.pop(getattr(message, "id", 0), None)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        if self.world.holders(self):
            self.world.wrongs.append("a leased model was ended")
        self.end_expected = True
        await asyncio.wait([self.ended], timeout=grace_s + TERM_GRACE_S)
        if not self.ended.done():
            self.die(-9)
        await asyncio.shield(self.ended)

    def become_ready(self, surprise: int) -> None:
        kv = max(self.spec.memory_bytes - STEP, 0)
        ready = Ready(
            pid=self.pid,
            device="cpu",
            dtype="float32",
            weight_bytes=card(self.spec.name).weight_bytes,
            kv_tokens=kv // TOKEN,
            context=min(2048, kv // TOKEN),
            load_s=2.0,
            cost=fit([Measured(64, 4, 1024, 64, STEP)], KvCost((GroupCost(TOKEN * BLOCK),), BLOCK)),
            process_bytes=PROCESS,
            step_bytes=STEP,
            kv_bytes=kv,
            kv_unit_bytes=1,
            kv_overhead_bytes=0,
            step_tokens=64,
            overhead_bytes=PROCESS + surprise,
        )
        self.client.receive(ready)
        self.ready.set_result(ready)

    def refuse(self, error: PenstockError) -> None:
        self.end_expected = True
        self.ready.set_exception(error)

    def answer(self) -> None:
        """Obey the oldest order, as far as its requests allow."""
        order = self.orders.pop(0)
        wanted = order.kv_bytes if isinstance(order, Grant) else self.kv - order.bytes
        before, self.kv = self.kv, max(wanted, min(sum(self.busy.values()), self.kv))
        # It has not heard the later orders yet, which let it have more.
        later = [o.kv_bytes for o in self.orders if isinstance(o, Grant)]
        told = self.kv
        self.kv = max([self.kv, *later])
        self.client.receive(Freed(max(before - told, 0), told))

    def step(self) -> None:
        block = TOKEN * BLOCK
        total = max(self.kv // block, 1) * block
        used = min(-(-sum(self.busy.values()) // block) * block, total)
        figures = Status(len(self.busy), 0, 1, 0.01, 0.0, 0, 1, total, total - used)
        self.client.receive(Step([], figures))

    def die(self, code: int) -> None:
        """In the order of the real one: the socket's end, then everyone is told."""
        self.alive = False
        if not self.ready.done():
            self.ready.set_exception(WorkerLost("lost"))
        self.ready.exception()
        self.client.lose("lost")
        self.ended.set_result(Ending("it ended", code))


@dataclass
class Births:
    """In place of the supervisor."""

    world: World
    waiting: list[tuple[LoadSpec, asyncio.Future[Worker]]] = field(default_factory=list)

    @property
    def launcher(self) -> Any:
        return self

    async def started(self) -> int:
        return 1

    async def start(self, spec: LoadSpec) -> Worker:
        birth: asyncio.Future[Worker] = self.world.loop.create_future()
        self.waiting.append((spec, birth))
        return await birth


@dataclass(eq=False)
class Request:
    """Someone who wants a lease, and then holds it."""

    name: str
    release: asyncio.Future[None]
    task: asyncio.Task[None] | None = None
    worker: Worker | None = None  # while the lease is held
    generations: list[WorkerStream] = field(default_factory=list)


def pick(things: list[T], which: int) -> T:
    return things[which % len(things)]


async def leave(generation: WorkerStream) -> None:
    async with generation:
        pass


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.undo = contextlib.ExitStack()
        self.loop = VirtualLoop()
        self.undo.callback(self.loop.close)
        self.undo.callback(asyncio.set_event_loop, None)
        clock = SimpleNamespace(monotonic=self.loop.time)
        self.next_pid = 100
        self.workers: list[Worker] = []
        self.requests: list[Request] = []
        self.others: list[asyncio.Task[Any]] = []  # unloads, growth
        self.wrongs: list[str] = []  # seen inside tasks, where nobody would hear of them
        self.marks = dict.fromkeys(NAMES, 0)
        self.broken: set[str] = set()
        for place, thing, fake in (
            (model_module, "time", clock),
            (residency_module, "time", clock),
            (residency_module, "read_gpus", lambda: ()),
            (residency_module, "read_process", lambda pid: None),
            (residency_module, "file_marks", lambda path: ((path.name, self.marks[path.name], 0),)),
        ):
            self.undo.enter_context(mock.patch.object(place, thing, fake))

    @initialize(
        limit=st.sampled_from((760, 900, 1100, 1300, 4000)),
        own_kv=st.booleans(),
        first=st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=3),
    )
    def open(self, limit: int, own_kv: bool, first: list[tuple[str, bool]]) -> None:
        self.ledger = Ledger({RAM: limit * MIB})
        self.births = Births(self)
        self.residency = Residency(
            cast("Any", SimpleNamespace(find=self.find)),
            cast("Any", self.births),
            self.ledger,
            ModelsSettings(device="cpu", kv_bytes=60 * MIB if own_kv else None),
            storage=Storage(Path("/profiles")),
            patience_s=PATIENCE_S,
        )
        self.ledger.on_room = self.room_is_free
        self.empty_books = self.ledger.snapshot()[RAM].owners
        self.real_unload = self.residency.unload
        self.residency.unload = self.unload_is_right  # type: ignore[method-assign]
        for name, hold in first:
            self.serve(name, hold, "ready", False, False)

    # --- what the world knows ---

    def find(self, name: str) -> Card:
        if name in self.broken:
            raise ModelUnusable("its config.json is rubbish")
        return card(name)

    def holders(self, worker: Worker) -> list[Request]:
        return [request for request in self.requests if request.worker is worker]

    def living(self, name: str) -> list[Worker]:
        return [w for w in self.workers if w.spec.name == name and not w.ended.done()]

    def open_requests(self) -> list[Request]:
        return [r for r in self.requests if r.task and not r.task.done()]

    def leased(self) -> list[Request]:
        return [r for r in self.requests if r.worker and r.worker.alive]

    def processes(self) -> list[Worker]:
        return [w for w in self.workers if not w.ended.done()]

    def loading(self) -> list[Worker]:
        return [w for w in self.processes() if not w.ready.done()]

    def ending(self) -> list[Worker]:
        return [w for w in self.processes() if w.end_expected]

    def ordered(self) -> list[Worker]:
        return [w for w in self.processes() if w.orders]

    def room_is_free(self) -> None:
        self.loop.call_soon(self.residency.arbiter.wake)

    async def unload_is_right(
        self, name: str, *args: Any, reason: str = "asked", **more: Any
    ) -> bool:
        if reason == "room":
            model = self.residency._models[name]
            if model.pinned:
                self.wrongs.append("a pinned model was unloaded to make room")
            if any(r.worker and r.worker.alive for r in self.requests if r.name == name):
                self.wrongs.append("a leased model was unloaded to make room")
            if model.waiting and not model.holds_new_leases:
                self.wrongs.append("a model was unloaded before those who waited had it")
        return await self.real_unload(name, *args, reason=reason, **more)

    def run(self, seconds: float = 0.0) -> None:
        self.loop.advance(seconds)

    def begin(self, work: Any) -> asyncio.Task[Any]:
        return self.loop.create_task(work)

    # --- requests ---

    @rule(name=st.sampled_from(NAMES), deadline=st.sampled_from((None, None, 30.0)))
    def request(self, name: str, deadline: float | None) -> None:
        request = Request(name, self.loop.create_future())

        async def use() -> None:
            async with self.residency.lease(name, deadline) as lease:
                [request.worker] = [w for w in self.workers if w.client is lease.client]
                try:
                    await request.release
                finally:
                    request.worker = None
                    for generation in request.generations:
                        await leave(generation)  # as whoever has a lease does

        request.task = self.begin(use())
        self.requests.append(request)
        self.run()

    @rule(
        name=st.sampled_from(NAMES),
        hold=st.booleans(),
        ending=st.sampled_from(("ready", "ready", "large", "unusable", "dead")),
        and_dies=st.sampled_from((False, False, False, True)),
        pin=st.sampled_from((False, False, True)),
    )
    def serve(self, name: str, hold: bool, ending: str, and_dies: bool, pin: bool) -> None:
        """A request for which everything happens at once, as far as it can."""
        self.request(name, None)
        mine = self.requests[-1]
        for _ in range(3):
            for worker in self.processes():
                while worker.orders:
                    worker.answer()
                    self.run()
                if worker.end_expected and not worker.ended.done():
                    worker.die(0)
                    self.run()
            if any(spec.name == name for spec, _ in self.births.waiting):
                self.birth([spec.name for spec, _ in self.births.waiting].index(name), "born")
            if loading := [w for w in self.loading() if w.spec.name == name]:
                self.load_ends(self.loading().index(loading[0]), ending, and_dies)
        if pin:
            self.pin(name)
        if not hold and mine.worker is not None:
            mine.release.set_result(None)
        self.run()

    @rule(busy=st.sampled_from(NAMES), other=st.sampled_from(NAMES))
    def leaves_the_line(self, busy: str, other: str) -> None:
        """A load waits for a busy model, requests for that one wait behind it, then it is off."""
        self.serve(busy, True, "ready", False, False)
        self.run(5)
        self.request(other, None)
        mine = self.requests[-1]
        self.request(busy, None)
        self.books_are_right()
        self.every_state_has_an_exit()
        assert mine.task is not None
        mine.task.cancel()
        self.run()

    @precondition(lambda self: self.open_requests())
    @rule(which=st.integers(0, 30), leaves=st.booleans())
    def request_ends(self, which: int, leaves: bool) -> None:
        request = pick(self.open_requests(), which)
        assert request.task is not None
        if leaves:
            request.task.cancel()
        elif not request.release.done():
            request.release.set_result(None)
        self.run()

    @precondition(lambda self: self.leased())
    @rule(which=st.integers(0, 30), tokens=st.integers(1, 1500))
    def computes(self, which: int, tokens: int) -> None:
        request = pick(self.leased(), which)
        worker = request.worker
        assert worker is not None
        if TOKEN * tokens + sum(worker.busy.values()) <= worker.kv:
            submit = Submit(0, [1] * tokens, 1, Sampling())
            generation = worker.client.generate(submit)
            request.generations.append(generation)
            worker.step()
            if which % 2:
                self.begin(leave(generation))
        self.run()

    # --- processes ---

    @precondition(lambda self: self.births.waiting)
    @rule(which=st.integers(0, 3), outcome=st.sampled_from(("born", "born", "born", "refused")))
    def birth(self, which: int, outcome: str) -> None:
        spec, birth = self.births.waiting.pop(which % len(self.births.waiting))
        if outcome == "refused":
            birth.set_exception(OSError(11, "no more processes"))
        else:
            worker = Worker(self, spec)
            self.workers.append(worker)
            birth.set_result(worker)
        self.run()

    @precondition(lambda self: self.loading())
    @rule(
        which=st.integers(0, 3),
        outcome=st.sampled_from((*["ready"] * 5, "large", "small", "unusable", "busy", "dead")),
        and_dies=st.sampled_from((False, False, True)),
    )
    def load_ends(self, which: int, outcome: str, and_dies: bool) -> None:
        worker = pick(self.loading(), which)
        match outcome:
            case "ready" | "large":
                worker.become_ready(300 * MIB if outcome == "large" else 0)
            case "small":
                worker.refuse(ModelTooLarge("its smallest step does not fit"))
            case "unusable":
                worker.refuse(ModelUnusable("a weight is missing"))
            case "busy":
                worker.refuse(Overloaded("not now"))
        if outcome == "dead" or and_dies:
            worker.die(-9)
        self.run()

    @precondition(lambda self: self.processes())
    @rule(which=st.integers(0, 3))
    def death(self, which: int) -> None:
        pick(self.processes(), which).die(-11)
        self.run()

    @precondition(lambda self: self.processes())
    @rule(which=st.integers(0, 3))
    def first_sign_of_death(self, which: int) -> None:
        pick(self.processes(), which).alive = False
        self.run()

    @precondition(lambda self: self.ending())
    @rule(which=st.integers(0, 3))
    def reaped(self, which: int) -> None:
        pick(self.ending(), which).die(0)
        self.run()

    @precondition(lambda self: self.ordered())
    @rule(which=st.integers(0, 3))
    def order_is_answered(self, which: int) -> None:
        pick(self.ordered(), which).answer()
        self.run()

    # --- users and neighbours ---

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: str) -> None:
        self.others.append(self.begin(self.residency.unload(name)))
        self.run()

    @rule(name=st.sampled_from(NAMES))
    def pin(self, name: str) -> None:
        if (model := self.residency._models.get(name)) is not None:
            model.pinned = not model.pinned
            self.run()

    @rule(name=st.sampled_from(NAMES), break_it=st.booleans())
    def files_change(self, name: str, break_it: bool) -> None:
        self.marks[name] += 1
        (self.broken.add if break_it else self.broken.discard)(name)

    @rule(name=st.sampled_from(NAMES), size=st.integers(1, 300))
    def grow(self, name: str, size: int) -> None:
        self.others.append(self.begin(self.residency.grow(card(name), size * MIB)))
        self.run()

    @rule(size=st.integers(1, 500))
    def requests_need_memory(self, size: int) -> None:
        self.others.append(self.begin(self.residency.arbiter.reclaim(RAM, size * MIB)))
        self.run()

    @rule()
    def spread(self) -> None:
        self.loop.call_soon(self.residency.arbiter.spread)
        self.run()

    @rule(external=st.sampled_from((0, 0, 300, 900)))
    def neighbours(self, external: int) -> None:
        state = self.ledger.snapshot()[RAM]
        self.ledger.observe(RAM, external * MIB, state.limit_bytes + 100 * MIB)
        self.run()

    @rule(seconds=st.sampled_from((0.01, 0.6, 3.0, 40.0, 301.0)))
    def time_passes(self, seconds: float) -> None:
        self.run(seconds)

    # --- after every rule ---

    @invariant()
    def books_are_right(self) -> None:
        self.ledger.check()
        state = self.ledger.snapshot()[RAM]
        assert state.booked_bytes <= state.limit_bytes
        for worker in self.workers:
            if worker.ended.done() or not self.is_known(worker):
                continue
            held = state.owners.get(owner_of(worker.spec.name), {})
            assert held, "a living process is not in the books"
            if Purpose.EXITING not in held:
                booked = held.get(Purpose.KV, 0) + held.get(Purpose.STEP, 0)
                assert worker.kv <= booked, "KV is in use and not booked"

    def is_known(self, worker: Worker) -> bool:
        return self.residency._models[worker.spec.name].worker is cast("Any", worker)

    @invariant()
    def every_state_has_an_exit(self) -> None:
        assert not self.loop.failures, self.loop.failures
        assert not self.wrongs, self.wrongs
        for model in self.residency._models.values():
            assert len(self.living(model.name)) <= 1, "two processes of one model"
            busy = model.task is not None and not model.task.done()
            match model.state:
                case State.LOADING:
                    assert busy, "it loads, and nobody does it"
                    assert model.waiting or model.worker or model.load_cancelled, "for nobody"
                case State.DRAINING:
                    assert busy, "it drains, and nobody does it"
                case State.READY:
                    assert model.worker is not None
                    assert model.grant is not None
                    free = model.worker.alive and not model.holds_new_leases
                    assert not (free and model.waiting), "ready, and they still wait"
                case _:
                    assert model.worker is None
                    assert model.grant is None, "bytes of nobody"

    # --- in the end ---

    def teardown(self) -> None:
        try:
            if hasattr(self, "residency"):
                self.all_comes_to_an_end()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.run(60)
            self.undo.close()

    def all_comes_to_an_end(self) -> None:
        """Everything that is waited for happens: nobody waits any longer, and every byte is back.

        In a third of the time after which waiting is given up: nobody needs that way out.
        """
        self.ledger.observe(RAM, 0)
        for model in self.residency._models.values():
            model.pinned = False
        for _ in range(200):
            self.kindly()
            if all(task.done() for task in self.tasks()):
                break
            self.run(1.0)
        for request in self.requests:
            assert request.task is not None
            assert request.task.done(), f"a request for {request.name} waits for ever"
            if not request.task.cancelled() and (error := request.task.exception()) is not None:
                assert isinstance(error, PenstockError), repr(error)
        for task in self.others:
            assert task.done()
            assert task.cancelled() or task.exception() is None
        for name in NAMES:
            self.others.append(self.begin(self.residency.unload(name)))
        for _ in range(20):
            self.kindly()
            self.run(1.0)
        states = {model.state for model in self.residency._models.values()}
        assert states <= {State.ABSENT, State.FAILED}, states
        assert self.ledger.snapshot()[RAM].owners == self.empty_books
        assert all(worker.ended.done() for worker in self.workers)
        self.every_state_has_an_exit()

    def tasks(self) -> list[asyncio.Task[Any]]:
        return [*(r.task for r in self.requests if r.task is not None), *self.others]

    def kindly(self) -> None:
        for request in self.requests:
            if not request.release.done():
                request.release.set_result(None)
        while self.births.waiting:
            self.birth(0, "born")
        for worker in list(self.workers):
            if worker.ended.done():
                continue
            if not worker.alive or worker.end_expected:
                worker.die(0)
                self.run()
                continue
            if not worker.ready.done():
                worker.become_ready(0)
                self.run()
            while worker.orders:
                worker.answer()
                self.run()
            self.books_are_right()
        self.run()


@pytest.mark.hypothesis
def test_residency_survives_everything() -> None:
    # With 250 examples every mutation in benchmarks/results/residency.json was noticed.
    plan = settings(max_examples=max(250, settings().max_examples), stateful_step_count=30)
    run_state_machine_as_test(World, settings=plan)
