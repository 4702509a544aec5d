"""Compiles a request's grammar in its model's grammar host, before the request is admitted.

Each model has a grammar host while there are requests with grammars, and a while longer. A grammar
is compiled in the quick lane; what is too much for it is tried once more in the slow one, a single
place with a low priority. So an ordinary grammar never waits behind a monstrous one. A request ends
with a 400 when its grammar is no grammar or exceeds the limits; its worker is given the key of the
compiled grammar and never sees the text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
import weakref
from collections import Counter, OrderedDict
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock.errors import BadRequest, Overloaded, PenstockError
from penstock.grammars.messages import Bounds, Outcome
from penstock.memory.domains import RAM
from penstock.memory.ledger import OutOfBudget, Purpose
from penstock.server.pipeline.fairness import FairSlots
from penstock.server.processes.grammar_host import GrammarHost, HostLost, begin_frame

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.catalog import Card
    from penstock.memory.ledger import Ledger, Reservation
    from penstock.server.residency.memory_arbiter import MemoryArbiter
    from penstock.text.grammars.grammar import GrammarSource
    from penstock.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_HOST = (RAM, Purpose.PROCESS)
_MATCHERS = (RAM, Purpose.GRAMMARS)
_QUICK_PLACES = 2
_SLOW_PLACES = 1
_QUICK_BYTES = 12 << 20
_ONE_BYTES = 64 << 20
# A host before its matchers: measured 33 MiB with 49,152 tokens, 20 of them without any.
_HOST_BYTES = 24 << 20
_TOKEN_BYTES = 400
_MATCHERS_IDLE_S = 5.0  # beyond what the host keeps them for; then their room is others'
_HOST_IDLE_S = 600.0
_TIDY_S = 2.0
_VERDICTS = 2048  # of one model that are kept, of at most a kilobyte each
_EXCEEDED_S = 300.0  # a refusal that may be the machine's fault is not kept for longer


def bounds_for(total_bytes: int, timeout_s: float) -> Bounds:
    """What one model's grammars may take."""
    one = min(_ONE_BYTES, total_bytes * 3 // 4)
    return Bounds(total_bytes, one, min(_QUICK_BYTES, one), timeout_s)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a grammar can be enforced."""

    outcome: Outcome
    reason: str
    at: float

    @property
    def holds(self) -> bool:
        """Whether it need not be found out again."""
        return self.outcome is not Outcome.EXCEEDED or time.monotonic() - self.at < _EXCEEDED_S

    def refuse(self, param: str) -> None:
        """Raise why not, if it cannot."""
        if self.outcome is not Outcome.READY:
            raise BadRequest(f"`{param}` cannot be enforced: {self.reason}", param=param)


# Everybody who wanted it has left before its turn came.
_ABANDONED = Verdict(Outcome.EXCEEDED, "nobody waits for it any more.", 0.0)


class _Model:
    """The grammars of one model."""

    def __init__(self, name: str) -> None:
        self.name = name
        # The host keeps its end; the other goes to the worker, when there is one.
        self.host_end, self.worker_end = _pair()
        self.taken = False
        self.tokenizer: Tokenizer | None = None  # of the latest request
        self.vocabulary = 0
        self.outdated = False  # the host has another tokenizer
        self.host: GrammarHost | None = None
        self.starting = asyncio.Lock()
        self.booking: Reservation | None = None
        self.sources: weakref.WeakValueDictionary[bytes, GrammarSource] = (
            weakref.WeakValueDictionary()
        )
        self.verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self.compiling: dict[bytes, asyncio.Task[Verdict]] = {}
        self.waiting: Counter[bytes] = Counter()  # who waits for each compile
        self.used_at = time.monotonic()

    def renew_sockets(self) -> None:
        """A new pair, for a new worker."""
        self.host_end.close()
        self.host_end, self.worker_end = _pair()
        self.taken = False


class Grammars:
    """The grammars of all models of one server."""

    def __init__(
        self, ledger: Ledger, capacity: MemoryArbiter, logs: Path, bounds: Bounds, patience_s: float
    ) -> None:
        self.bounds = bounds
        self._ledger = ledger
        self._arbiter = capacity
        self._logs = logs
        self._patience_s = patience_s
        self._models: dict[str, _Model] = {}
        self._quick = FairSlots(_QUICK_PLACES)
        self._slow = FairSlots(_SLOW_PLACES)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._tidying: asyncio.Task[None] | None = None
        self._closed = False

    # --- for requests --------------------------------------------------------------------------

    async def verdict(
        self, card: Card, tokenizer: Tokenizer, source: GrammarSource, caller: str
    ) -> Verdict:
        """Whether answers of a model can be held to a grammar; `Overloaded` if there is no telling
        for too long."""
        if find_spec("llguidance") is None:
            why = "the package llguidance is not installed on this server."
            return Verdict(Outcome.INVALID, why, 0.0)
        model = self._model(card.name)
        if model.tokenizer is not tokenizer:
            model.tokenizer, model.vocabulary, model.outdated = tokenizer, card.vocab_size, True
            model.verdicts.clear()
        model.used_at = time.monotonic()
        model.sources[source.key] = source
        known = model.verdicts.get(source.key)
        if known is not None and known.holds:
            model.verdicts.move_to_end(source.key)
            return known
        model.waiting[source.key] += 1
        try:
            return await asyncio.shield(self._compiling(model, source, caller))
        finally:
            self._no_longer_waits(model, source.key)

    def _compiling(
        self, model: _Model, source: GrammarSource, caller: str
    ) -> asyncio.Task[Verdict]:
        """The one compile of a grammar; all who want it wait for the same."""
        task = model.compiling.get(source.key)
        if task is None:
            task = asyncio.ensure_future(self._compile(model, source, caller))
            model.compiling[source.key] = task
            self._keep(task)
        return task

    @staticmethod
    def _no_longer_waits(model: _Model, key: bytes) -> None:
        model.waiting[key] -= 1
        if not model.waiting[key]:
            del model.waiting[key]

    async def _compile(self, model: _Model, source: GrammarSource, caller: str) -> Verdict:
        try:
            return await self._compile_in_turn(model, source, caller)
        finally:
            del model.compiling[source.key]

    async def _compile_in_turn(self, model: _Model, source: GrammarSource, caller: str) -> Verdict:
        try:
            async with asyncio.timeout(self._patience_s):
                async with self._quick.place(caller):
                    if source.key not in model.waiting:
                        return _ABANDONED
                    verdict = await self._order(model, source, quick=True)
                if verdict.outcome is Outcome.EXCEEDED:
                    async with self._slow.place(caller):
                        if source.key not in model.waiting:
                            return _ABANDONED
                        verdict = await self._order(model, source, quick=False)
        except TimeoutError:
            raise Overloaded(
                f"The grammar of this request waited {self._patience_s:.0f} s for its turn or for "
                f"memory (server.queue_deadline_s; memory.grammars is "
                f"{self.bounds.total_bytes >> 20} MiB for each model).",
                retry_after_s=10,
            ) from None
        model.verdicts[source.key] = verdict
        while len(model.verdicts) > _VERDICTS:
            model.verdicts.popitem(last=False)
        return verdict

    async def _order(self, model: _Model, source: GrammarSource, *, quick: bool) -> Verdict:
        for last in (False, True):
            host = await self._host(model)
            try:
                answer = await host.compile(source.key, source.text, quick=quick)
            except HostLost:
                if last:
                    raise
            else:
                return Verdict(answer.outcome, answer.reason, time.monotonic())
        raise AssertionError

    # --- for workers ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def worker_socket(self, name: str) -> Iterator[socket.socket]:
        """A new worker's way to the grammar host of its model."""
        model = self._model(name)
        if model.taken:
            # What the last worker has left unread is not the next one's.
            model.renew_sockets()
            if model.host is not None:
                self._keep(asyncio.ensure_future(self._replace(model, model.host)))
        model.taken = True
        with model.worker_end as sock:
            yield sock

    def _model(self, name: str) -> _Model:
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = _Model(name)
        return model

    def _wanted(self, model: _Model, key: bytes) -> None:
        """A worker wants a grammar whose matcher had to go."""
        source = model.sources.get(key)
        if source is not None:
            model.waiting[key] += 1
            task = self._compiling(model, source, "")
            task.add_done_callback(lambda _: self._no_longer_waits(model, key))

    # --- hosts ---------------------------------------------------------------------------------

    def processes(self) -> dict[str, int]:
        """The hosts, by the owner that they are booked under."""
        return {
            _owner(name): model.host.pid
            for name, model in self._models.items()
            if model.host is not None and model.host.alive
        }

    async def close(self) -> None:
        """End all of them."""
        self._closed = True
        tasks = [*self._tasks, *([] if self._tidying is None else [self._tidying])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._stop(model) for model in self._models.values()))
        for model in self._models.values():
            model.host_end.close()
            model.worker_end.close()

    async def _host(self, model: _Model) -> GrammarHost:
        """The running host of a model, started if there is none."""
        async with model.starting:
            if model.host is not None and model.host.alive and not model.outdated:
                await self._book_matchers(model)
                return model.host
            await self._stop(model)
            if self._closed:
                raise HostLost("The server is shutting down.")
            tokenizer, vocabulary, model.outdated = model.tokenizer, model.vocabulary, False
            assert tokenizer is not None
            needs = {_HOST: _HOST_BYTES + _TOKEN_BYTES * vocabulary}
            booking = self._ledger.reserve(_owner(model.name), {})
            with contextlib.ExitStack() as undo:
                undo.callback(booking.release)
                await self._arbiter.book(booking, {**needs, _MATCHERS: self.bounds.total_bytes})
                frame = await asyncio.to_thread(begin_frame, tokenizer, vocabulary, self.bounds)
                name = model.name.replace("/", "--").replace(":", "-")
                host = GrammarHost.launch(model.host_end, self._logs / f"{name}.grammars.log")
                try:
                    held = await host.begin(frame)
                except BaseException:
                    await host.stop()
                    raise
                with contextlib.suppress(OutOfBudget):
                    booking.resize({**booking.needs, _HOST: held})
                undo.pop_all()
            model.host, model.booking = host, booking
            host.on_wanted = lambda key: self._wanted(model, key)
            host.on_end = lambda: self._lost(model, host)
            if self._tidying is None:
                self._tidying = asyncio.ensure_future(self._tidy())
            return host

    async def _book_matchers(self, model: _Model) -> None:
        assert model.booking is not None
        if _MATCHERS not in model.booking.needs:
            needs = {**model.booking.needs, _MATCHERS: self.bounds.total_bytes}
            await self._arbiter.book(model.booking, needs)

    def _lost(self, model: _Model, host: GrammarHost) -> None:
        """A host has died: whoever follows a grammar needs another."""
        log.warning("the grammar host of %s (process %d) has ended", model.name, host.pid)
        if model.host is host and model.sources and not self._closed:
            self._keep(asyncio.ensure_future(self._replace(model, host)))

    async def _replace(self, model: _Model, host: GrammarHost) -> None:
        async with model.starting:
            if model.host is host:  # a request may have been first
                await self._stop(model)
        if model.sources and model.tokenizer is not None:
            try:
                await self._host(model)
            except PenstockError as error:
                log.error("no grammar host for %s: %s", model.name, error.message)

    async def _stop(self, model: _Model) -> None:
        host, model.host = model.host, None
        if host is not None:
            await host.stop()
        if model.booking is not None:
            model.booking.release()
            model.booking = None

    async def _tidy(self) -> None:
        """Give back what nobody has needed for a while."""
        while True:
            await asyncio.sleep(_TIDY_S)
            now = time.monotonic()
            for model in self._models.values():
                if model.sources or model.compiling:
                    model.used_at = now
                elif model.host is not None and not model.starting.locked():
                    idle_s = now - model.used_at
                    if idle_s > _HOST_IDLE_S:
                        await self._stop(model)
                    elif model.booking and idle_s > self.bounds.idle_s + _MATCHERS_IDLE_S:
                        needs = {k: v for k, v in model.booking.needs.items() if k != _MATCHERS}
                        model.booking.resize(needs)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)  # the loop itself keeps tasks only weakly
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("a compile ended with %s", error)


def _owner(name: str) -> str:
    return f"grammars {name}"


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
