"""The HTTP application: who may come in, which endpoint answers, and what is logged.

It owns the edge: ids, keys, hosts, errors that nobody else caught. What an endpoint does is its
own affair; how the process starts and ends is `run.py`'s.
"""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route

from penstock.errors import (
    Forbidden,
    InternalError,
    MethodNotAllowed,
    PenstockError,
    Unauthorized,
    UnknownRoute,
)
from penstock.server.api import (
    admin,
    anthropic,
    chat,
    completions,
    models,
    ollama,
    openapi,
    plan,
    residents,
    responses,
)
from penstock.server.api.errors import error_headers, style_of
from penstock.server.api.exchange import ClientGone, Exchange
from penstock.server.reconfigure import LOOPBACK_NAMES, is_loopback

if TYPE_CHECKING:
    import asyncio

    from starlette.types import ASGIApp, Receive, Scope, Send

    from penstock.config import Config
    from penstock.server.api.services import Services

log = logging.getLogger(__name__)
access_log = logging.getLogger("penstock.access")

Endpoint = Callable[[Exchange, "Services"], Awaitable[None]]

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_OPEN_ROUTES = frozenset({"/health"})

_ENDPOINTS: list[tuple[str, str, Endpoint]] = [
    ("GET", "/", admin.front_page),
    ("GET", "/health", admin.health),
    ("GET", "/ready", admin.ready),
    ("GET", "/metrics", admin.metrics),
    ("GET", "/openapi.json", openapi.openapi),
    ("GET", "/admin/api/models", residents.resident_models),
    ("POST", "/admin/api/models/{id:path}/load", residents.load),
    ("POST", "/admin/api/models/{id:path}/unload", residents.unload),
    ("POST", "/admin/api/models/{id:path}/pin", residents.pin),
    ("POST", "/admin/api/reload", admin.reread_settings),
    ("GET", "/admin/api/memory", admin.memory),
    ("POST", "/admin/api/memory/reset", admin.reset_memory),
    ("GET", "/admin/api/requests", admin.waiting_requests),
    ("GET", "/admin/api/events", admin.events),
    ("GET", "/admin/api/plan", plan.plan_model),
    ("POST", "/v1/plan", plan.plan_request),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{id:path}", models.show_model),
    ("POST", "/v1/chat/completions", chat.chat_completions),
    ("POST", "/v1/completions", completions.completions),
    ("POST", "/v1/responses", responses.create),
    ("GET", "/v1/responses/{id}", responses.retrieve),
    ("DELETE", "/v1/responses/{id}", responses.delete),
    ("POST", "/v1/responses/{id}/cancel", responses.cancel),
    ("GET", "/v1/responses/{id}/input_items", responses.input_items),
    ("POST", "/api/chat", ollama.chat),
    ("POST", "/api/generate", ollama.generate),
    ("GET", "/api/tags", ollama.tags),
    ("POST", "/api/show", ollama.show),
    ("GET", "/api/version", ollama.version),
    ("POST", "/v1/messages", anthropic.messages),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
]


def build_app(services: Services, closing: asyncio.Event) -> ASGIApp:
    """The application; answers still running end when `closing` is set."""
    app: ASGIApp = App(services, closing)
    if origins := services.config.server.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


class App:
    """Takes an HTTP exchange to its endpoint, and out again with a log line."""

    def __init__(self, services: Services, closing: asyncio.Event) -> None:
        self._services = services
        self._closing = closing
        self._config = services.config
        self._door = _Door(self._config)
        self._routes = [
            (Route(path, _unused, methods=[method]), endpoint)
            for method, path, endpoint in _ENDPOINTS
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if self._config is not self._services.config:  # read again since
            self._config = self._services.config
            self._door = _Door(self._config)
        exchange = Exchange(
            dict(scope),
            receive,
            send,
            _request_id(scope),
            self._services.requests.share(),
            self._config.server.max_body,
            self._closing,
            self._config.server.slow_client_s,
            style=style_of(scope["path"]),
        )
        exchange.record["route"] = "unknown"
        try:
            await self._dispatch(exchange)
        except ClientGone:
            exchange.record["client"] = "gone"
        except PenstockError as error:
            await self._refuse(exchange, error)
        except Exception:  # the edge of the process: whatever it is, the server lives on
            log.exception("a request failed", extra={"fields": {"id": exchange.id}})
            await self._refuse(
                exchange,
                InternalError(f"The server made a mistake; its log says more under {exchange.id}."),
            )
        finally:
            exchange.share.release()
            self._note(exchange)

    async def _dispatch(self, exchange: Exchange) -> None:
        self._door.check_host(exchange)
        endpoint, route, params = self._find(exchange)
        exchange.record["route"] = route
        exchange.scope["path_params"] = params
        if route not in _OPEN_ROUTES:
            self._door.check_key(exchange)
        await endpoint(exchange, self._services)

    def _find(self, exchange: Exchange) -> tuple[Endpoint, str, dict[str, str]]:
        method, path = exchange.scope["method"], exchange.scope["path"]
        allowed: list[str] = []
        for route, endpoint in self._routes:
            match, child = route.matches(exchange.scope)
            if match is Match.FULL:
                return endpoint, route.path, child["path_params"]
            if match is Match.PARTIAL:
                allowed += sorted((route.methods or set()) - {"HEAD"})
        self._door.check_key(exchange)
        if allowed:
            said = f"{path} takes {' and '.join(allowed)}, not {method}."
            raise MethodNotAllowed(said, allowed)
        raise UnknownRoute(f"There is nothing at {path}.")

    async def _refuse(self, exchange: Exchange, error: PenstockError) -> None:
        exchange.record["error"] = error.code
        headers = error_headers(error)
        if error.status == 413:
            headers["connection"] = "close"  # the rest of the body is not wanted
        await exchange.refuse(error, headers)

    def _note(self, exchange: Exchange) -> None:
        route = str(exchange.record["route"])
        self._services.metrics.answered(route, exchange)
        fields = {
            "id": exchange.id,
            "method": exchange.scope["method"],
            **exchange.record,
            "status": exchange.status,
            "total_ms": round(1000 * (time.monotonic() - exchange.started), 1),
        }
        quiet = route in {"/health", "/ready", "/metrics"}
        access_log.log(
            logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields}
        )


class _Door:
    """Who may come in: by key, or without keys by where the request says it goes and comes from.

    A web page can make a browser send requests to this machine, under a name of the page's own
    (DNS rebinding) or as a form. Where no key stands in the way, the Host and Origin headers must.
    """

    def __init__(self, config: Config) -> None:
        settings = config.server
        self._digests = [sha256(key.encode()).digest() for key in settings.api_keys]
        self._share_kv = config.cache.share
        self._guard_names = is_loopback(settings.host) and not settings.api_keys
        further = (name.lower() for name in settings.hosts)
        self._names = {*LOOPBACK_NAMES, settings.host, *further}
        self._origins = set(settings.cors_origins)

    def check_host(self, exchange: Exchange) -> None:
        """Refuse a Host or Origin that is not ours."""
        if not self._guard_names:
            return
        host = exchange.header(b"host")
        if host is not None and _hostname(f"//{host}") not in self._names:
            raise Forbidden(
                f"This server does not answer to the host name {host[:100]!r}; "
                "server.hosts names further ones, and with an API key any name will do."
            )
        origin = exchange.header(b"origin")
        if origin is None or origin in self._origins or "*" in self._origins:
            return
        if _hostname(origin) not in self._names:
            raise Forbidden(
                f"The web origin {origin[:100]!r} may not use this server; "
                "server.cors_origins names those that may."
            )

    def check_key(self, exchange: Exchange) -> None:
        """Refuse a request without one of the keys, if there are any."""
        if not self._digests:
            return
        scheme, _, token = (exchange.header(b"authorization") or "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else ""
        given = given or exchange.header(b"x-api-key") or ""
        if not given:
            raise Unauthorized(
                "An API key is needed: send `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )
        digest = sha256(given.encode()).digest()
        # Every key is compared, so that the time taken says nothing about which one was near.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise Unauthorized("The API key is not one of this server's.")
        number = matches.index(True)
        exchange.caller = f"key {number + 1}"
        # Of the key itself: keys come and go while the server runs, and their numbers change.
        exchange.owner = sha256(b"responses" + self._digests[number]).hexdigest()[:32]
        if not self._share_kv:
            # Of the key itself, so that KV on disk is found again whatever the order of keys.
            exchange.salt = sha256(b"kv" + self._digests[number]).digest()


def _hostname(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SANE_ID.fullmatch(text := value.decode("latin-1")):
            return str(text)
    return f"req-{uuid.uuid4().hex}"


async def _unused(_: object) -> None:
    """Starlette's routes are used for matching only."""
