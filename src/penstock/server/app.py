"""The HTTP application: who may come in, which endpoint answers, and what is logged.

It owns the edge: ids, routes, clients that leave, errors that nobody else caught. Who may come in
is `access.py`'s to say; what an endpoint does is its own affair.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING

from starlette.routing import Match

from penstock.errors import InternalError, MethodNotAllowed, PenstockError, UnknownRoute
from penstock.server.http.access import (
    Door,
    cors_headers,
    is_admin_route,
    is_page_route,
    is_preflight,
)
from penstock.server.http.bodies import BodyLimits, ClientGone
from penstock.server.http.connection import GONE, SHOWN_KEY
from penstock.server.http.errors import error_headers
from penstock.server.http.exchange import AnswerLimits, Exchange
from penstock.server.http.peer import is_loopback_address
from penstock.server.http.threads import work_for
from penstock.server.routes import canonical_path, rows_at, style_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp, Receive, Scope, Send

    from penstock.config import ServerSettings
    from penstock.server.http.openapi import Endpoint
    from penstock.server.protocols.services import Services

log = logging.getLogger(__name__)
access_log = logging.getLogger("penstock.access")

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_ADMIN_BODY_BYTES = 64 << 10
# Of a browser that signs in: nobody knows yet whether it may.
_KEY_BYTES = 4 << 10
_KEY_S = 2.0


def build_app(services: Services, closing: asyncio.Event) -> ASGIApp:
    """The application; answers still running end when `closing` is set."""
    return App(services, closing)


class App:
    """Takes an HTTP exchange to its endpoint, and out again with a log line."""

    def __init__(self, services: Services, closing: asyncio.Event) -> None:
        self._services = services
        self._closing = closing
        self._config = services.config
        self._door = Door(self._config, services.sessions)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if self._config is not self._services.config:  # read again since
            self._config = self._services.config
            self._door = Door(self._config, self._services.sessions)
        exchange = self._exchange(scope, receive, send)
        try:
            with _until_gone(exchange):
                await self._dispatch(exchange)
        except ClientGone:
            exchange.record.setdefault("client", "gone")
        except PenstockError as error:
            await self._refuse(exchange, error)
        except Exception:  # the edge of the process: whatever it is, the server lives on
            log.exception("a request failed", extra={"fields": {"id": exchange.id}})
            await self._refuse(
                exchange,
                InternalError(f"The server made a mistake; its log says more under {exchange.id}."),
            )
        finally:
            exchange.memory.release()
            self._note(exchange)

    def _exchange(self, scope: Scope, receive: Receive, send: Send) -> Exchange:
        settings = self._config.server
        services, path = self._services, canonical_path(scope["path"])
        # Operators' requests have memory of their own, which no client's body can take.
        operators = is_admin_route(path) or is_page_route(path)
        pool = services.admin_requests if operators else services.requests
        exchange = Exchange(
            {**scope, "path": path},
            receive,
            send,
            _request_id(scope),
            pool.request_memory(),
            _limits(settings, path),
            self._closing,
            AnswerLimits(settings.slow_client_s, settings.answer_rate),
            style=style_of(path, anthropic=_has_header(scope, b"anthropic-version")),
        )
        exchange.record["route"] = "unknown"
        exchange.trace = exchange.header(b"traceparent") or ""
        return exchange

    async def _dispatch(self, exchange: Exchange) -> None:
        self._door.check_names(exchange)
        if exchange.origin is not None:
            exchange.extra_headers = cors_headers(exchange.origin)
        endpoint, route, params = self._find(exchange)
        exchange.record["route"] = route
        exchange.scope["path_params"] = params
        if is_preflight(exchange):
            self._door.check_page(exchange, route)
            await exchange.begin(204, self._door.preflight(exchange))
            await exchange.write(b"", more=False)
            return
        self._door.check_key(exchange, route)
        exchange.memory.client = _client(exchange)
        work_for(exchange.memory.client)
        shown_key = exchange.scope.get("extensions", {}).get(SHOWN_KEY)
        if exchange.key and shown_key is not None:
            shown_key(exchange.key)
        await endpoint(exchange, self._services)

    def _find(self, exchange: Exchange) -> tuple[Endpoint, str, dict[str, str]]:
        method, path = exchange.scope["method"], exchange.scope["path"]
        allowed: list[str] = []
        for route, endpoint in rows_at(path):
            match, child = route.matches(exchange.scope)
            if match is Match.FULL or (match is Match.PARTIAL and is_preflight(exchange)):
                return endpoint, route.path, child["path_params"]
            if match is Match.PARTIAL:
                allowed += sorted((route.methods or set()) - {"HEAD"})
        self._door.check_key(exchange, path)
        if allowed:
            said = f"{path} takes {' and '.join(allowed)}, not {method}."
            raise MethodNotAllowed(said, allowed)
        raise UnknownRoute(f"There is nothing at {path}.")

    async def _refuse(self, exchange: Exchange, error: PenstockError) -> None:
        exchange.record["error"] = error.code
        request = {
            "id": exchange.id,
            "route": exchange.record["route"],
            "model": exchange.record.get("model"),
            "key": exchange.key,
        }
        self._services.records.refusals.add(error, request, exchange.style.status(error))
        await exchange.refuse(error, error_headers(error))

    def _note(self, exchange: Exchange) -> None:
        route = str(exchange.record["route"])
        seconds = time.monotonic() - exchange.started
        self._services.metrics.answered(route, exchange.status, seconds)
        fields = {
            "id": exchange.id,
            "method": exchange.scope["method"],
            **exchange.record,
            "status": exchange.status,
            "total_ms": round(1000 * seconds, 1),
        }
        quiet = route in {"/health", "/ready", "/metrics", "/web/{path:path}"}
        access_log.log(
            logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields}
        )


@contextmanager
def _until_gone(exchange: Exchange) -> Iterator[None]:
    """Cancel what is done for a request when its client leaves, wherever it waits."""
    gone = exchange.scope.get("extensions", {}).get(GONE)
    task = asyncio.current_task()
    if gone is None or task is None:
        yield
        return

    def cancel(_: object) -> None:
        if not exchange.answered:
            task.cancel()

    gone.add_done_callback(cancel)
    try:
        yield
    except asyncio.CancelledError:
        if not gone.done():
            raise
        task.uncancel()
        raise ClientGone from None
    finally:
        gone.remove_done_callback(cancel)


def _client(exchange: Exchange) -> str:
    """As whose a request's memory counts: the key's, otherwise the machine's; of this machine, all
    of whose programs have one address, the connection's."""
    host, port = exchange.scope.get("client") or ("127.0.0.1", 0)
    if exchange.key or not is_loopback_address(host):
        return exchange.caller
    return f"{host}:{port}"


def _limits(settings: ServerSettings, path: str) -> BodyLimits:
    if is_page_route(path):
        return BodyLimits(_KEY_BYTES, whole_s=_KEY_S)
    max_bytes = _ADMIN_BODY_BYTES if is_admin_route(path) else settings.max_body
    return BodyLimits(max_bytes, settings.body_s, settings.body_rate, settings.body_grace_s)


def _has_header(scope: Scope, name: bytes) -> bool:
    return any(key == name for key, _ in scope["headers"])


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SANE_ID.fullmatch(text := value.decode("latin-1")):
            return str(text)
    return f"req-{uuid.uuid4().hex}"
