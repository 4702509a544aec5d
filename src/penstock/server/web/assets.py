"""The files of the page, and what stands at `/`.

They are static, without a framework and without a build: read once, kept (some 200 kB), and sent
with a policy under which a browser runs no script but these and speaks to no other server.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import __version__
from penstock.errors import UnknownRoute, shortened
from penstock.server.http.access import wants_page

if TYPE_CHECKING:
    from penstock.server.http.exchange import Exchange
    from penstock.server.protocols.services import Services

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Without `unsafe-inline`; and a script cannot make markup of a text (trusted types).
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # Asked for every time and answered with 304: a new version is there at once.
    "cache-control": "no-cache",
}
_PLAIN = "text/plain; charset=utf-8"
_FRONT_PAGE = f"""Penstock {__version__} serves language models behind the usual APIs.

  /v1/models             the models that can be asked
  /v1/chat/completions   a conversation
  /v1/completions        a text to be continued
  /v1/responses          an answer as items, stored
  /v1/messages           a conversation, as Anthropic has it
  /api/chat              a conversation, as Ollama has it
  /openapi.json          all of this for programs
  /v1/plan               what a request would need, without running it
  /admin/api/models      the models in memory; also memory, requests, events, plan
  /tokenize /detokenize  a text's tokens, and back
  /health  /ready  /metrics
"""
_OLLAMA_WORDS = "Ollama is running"


@dataclass(frozen=True, slots=True)
class _File:
    """One file of the page."""

    content: bytes
    media_type: str
    etag: str


@cache
def files() -> dict[str, _File]:
    """By their address below `/web/`; nothing else of the disk can be asked for."""
    found = {}
    for path in sorted(_FOLDER.rglob("*")):
        if (media_type := _TYPES.get(path.suffix)) is not None:
            content = path.read_bytes()
            etag = f'"{sha256(content).hexdigest()[:24]}"'
            found[path.relative_to(_FOLDER).as_posix()] = _File(content, media_type, etag)
    return found


async def front_page(exchange: Exchange, services: Services) -> None:
    """What this server is, for a person with a browser: the page, or without it a text. Programs
    that ask here want to know whether Ollama's API is served, and look for its words."""
    if not wants_page(exchange):
        await exchange.send_bytes(_OLLAMA_WORDS.encode(), _PLAIN)
    elif services.config.server.dashboard == "off":
        await exchange.send_bytes(_FRONT_PAGE.encode(), _PLAIN)
    else:
        await _send(exchange, files()["index.html"])


async def asset(exchange: Exchange, services: Services) -> None:
    """A file of the page."""
    name = exchange.path_params["path"]
    file = files().get(name)
    if file is None:
        raise UnknownRoute(f"The page has no file {shortened(name)!r}.")
    await _send(exchange, file)


async def _send(exchange: Exchange, file: _File) -> None:
    headers = {**_HEADERS, "etag": file.etag, "vary": "accept"}
    if file.etag in (exchange.header(b"if-none-match") or ""):
        await exchange.begin(304, headers)
        await exchange.write(b"", more=False)
        return
    await exchange.send_bytes(file.content, file.media_type, headers=headers)
