"""Who may do what: by key, by where a request comes from, and by the web page that sent it.

Three kinds of routes. `/health` is open, and probes can be. Inference needs one of the API keys, if
there are any. Administration needs an admin key; if there is none, a request from this machine
itself that no web page of another origin has sent.

A web page can make a browser send requests to this machine, under a name of the page's own (DNS
rebinding) or as a form. Where no key stands in the way, the Host and Origin headers must.

The server's own page is open, and holds nothing. It signs in with a key and from then on sends a
cookie (`sessions`), which is worth the key in requests of that page only.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from penstock.errors import Forbidden, Unauthorized, UnknownRoute
from penstock.server.http.peer import LOOPBACK_NAMES, is_loopback, is_loopback_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.config import Config
    from penstock.server.http.exchange import Exchange
    from penstock.server.http.sessions import Sessions

_OPEN_ROUTES = frozenset({"/health"})
_PROBES = frozenset({"/ready", "/metrics"})
# Pages of programs on this machine, which no web site can claim to be. `null` is not among them:
# any sandboxed frame is that.
_APP_SCHEMES = frozenset({"app", "tauri", "vscode-webview", "vscode-file", "capacitor", "ionic"})
# A proxy on this machine brings requests of others.
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via")
_COOKIE = "penstock"
_METHODS = "GET, POST, DELETE"
_EXPOSED = "x-request-id, retry-after"
_PREFLIGHT_S = 600


def is_admin_route(path: str) -> bool:
    """Whether an address is for administration."""
    return path == "/admin" or path.startswith("/admin/")


def is_page_route(path: str) -> bool:
    """Whether an address is of the server's own page: its files, and signing in."""
    return path == "/web" or path.startswith("/web/")


def wants_page(exchange: Exchange) -> bool:
    """Whether a browser asks for a page, as no API client does."""
    return "text/html" in (exchange.header(b"accept") or "")


@dataclass(frozen=True, slots=True)
class _Key:
    """One of a list of keys, found again."""

    number: int  # from 1
    digest: bytes


class Door:
    """The rules of one set of settings."""

    def __init__(self, config: Config, sessions: Sessions) -> None:
        settings = config.server
        self._sessions = sessions
        self._dashboard = settings.dashboard
        self._digests = _digests(settings.api_keys)
        self._admin_digests = _digests(settings.admin_keys)
        self._share_kv = config.cache.share
        self._guarded = is_loopback(settings.host) and not settings.api_keys
        further = (name.lower() for name in settings.hosts)
        self._names = {*LOOPBACK_NAMES, settings.host, *further}
        self._origins = set(settings.cors_origins)
        self._open = _OPEN_ROUTES | (_PROBES if settings.open_probes else frozenset())

    def check_names(self, exchange: Exchange) -> None:
        """Refuse a Host or Origin that is not ours; an Origin that may read answers is noted."""
        host, origin = exchange.header(b"host"), exchange.header(b"origin")
        if self._guarded and host is not None and _hostname(f"//{host}") not in self._names:
            raise Forbidden(
                f"This server does not answer to the host name {host[:100]!r}; "
                "server.hosts names further ones, and with an API key any name will do."
            )
        if origin is None:
            if self._guarded:
                _check_fetch(exchange)
            return
        if _is_own(origin, host) or self._may_read(origin):
            exchange.origin = origin
        elif self._guarded or is_preflight(exchange):
            raise Forbidden(
                f"The web origin {origin[:100]!r} may not use this server; "
                "server.cors_origins names those that may."
            )

    def check_page(self, exchange: Exchange, route: str) -> None:
        """Refuse to be administered by a page that is not the server's own."""
        origin = exchange.header(b"origin")
        if not (is_admin_route(route) or is_page_route(route)):
            return
        if origin is None:
            _check_fetch(exchange)
        elif not _is_own(origin, exchange.header(b"host")):
            exchange.origin, exchange.extra_headers = None, {}
            raise Forbidden(
                f"A page of the origin {origin[:100]!r} may not administer this server; only "
                "programs and its own pages may."
            )

    def preflight(self, exchange: Exchange) -> dict[str, str]:
        """The answer to a browser that asks what a page may send; it asks without a key."""
        headers = {
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": exchange.header(b"access-control-request-headers")
            or "*",
            "access-control-max-age": str(_PREFLIGHT_S),
        }
        # A page of the internet that asks for an address of a private network.
        if exchange.header(b"access-control-request-private-network") == "true":
            headers["access-control-allow-private-network"] = "true"
        return headers

    def check_key(self, exchange: Exchange, route: str) -> None:
        """Refuse a request that has not the key, or the place, that its route needs."""
        self.check_page(exchange, route)
        if is_page_route(route):
            if self._dashboard == "off":
                raise UnknownRoute(f"There is nothing at {route}; server.dashboard is off.")
        elif is_admin_route(route):
            self._check_admin(exchange)
            self._check_changes(exchange)
        elif route not in self._open and not (route == "/" and self.shows_page(exchange)):
            self._check_client(exchange)

    def shows_page(self, exchange: Exchange) -> bool:
        """Whether `/` is answered with the page."""
        return self._dashboard != "off" and wants_page(exchange)

    def role(self, exchange: Exchange) -> tuple[str | None, str]:
        """What a browser may do as it is: `admin`, `client` or nothing, and why not more."""
        try:
            self._check_admin(exchange)
        except (Unauthorized, Forbidden) as error:
            why = error.message
        else:
            return "admin", ""
        try:
            self._check_client(exchange)
        except Unauthorized:
            return None, why
        return "client", why

    def sign_in(self, exchange: Exchange, key: str) -> str:
        """The cookie for a browser that shows a key."""
        digest = sha256(key.encode()).digest()
        if not key or _find(digest, [*self._digests, *self._admin_digests]) is None:
            raise Unauthorized("The key is not one of this server's.")
        token = self._sessions.open(digest)
        return _cookie(exchange, token)

    def sign_out(self, exchange: Exchange) -> str:
        """End the browser's session; the cookie that takes its own away."""
        if token := _token(exchange):
            self._sessions.close(token)
        return f"{_cookie(exchange, '')}; Max-Age=0"

    def _given(self, exchange: Exchange) -> bytes | None:
        """The digest of the key of a request: sent along, or shown when its browser signed in."""
        if given := _sent_key(exchange):
            return sha256(given.encode()).digest()
        token = _token(exchange)
        if not token or self._dashboard == "off" or not _is_own_page(exchange):
            return None
        return self._sessions.key_digest(token)

    def _check_changes(self, exchange: Exchange) -> None:
        changes = exchange.scope["method"] not in ("GET", "HEAD")
        if changes and self._dashboard != "full" and _is_browser(exchange):
            raise Forbidden(
                f"The page changes nothing here: server.dashboard is {self._dashboard}. Programs "
                "may, and with server.dashboard = full the page too."
            )

    def _check_admin(self, exchange: Exchange) -> None:
        if self._admin_digests:
            if _find(self._given(exchange), self._admin_digests) is None:
                raise Unauthorized(
                    "An admin key is needed here (one of server.admin_keys): send "
                    "`Authorization: Bearer KEY` or `x-api-key: KEY`."
                )
        elif not self._is_here(exchange):
            raise Forbidden(
                "Without server.admin_keys this server is administered only from its own machine, "
                "at a loopback address and not through a proxy."
            )
        elif self._digests:
            self._check_client(exchange)

    def _is_here(self, exchange: Exchange) -> bool:
        """Whether a program of this machine asks, and not for somebody else."""
        client = exchange.scope.get("client")
        host = exchange.header(b"host")
        return (
            client is not None
            and is_loopback_address(client[0])
            and (host is None or is_loopback(_hostname(f"//{host}") or ""))
            and not any(exchange.header(name) for name in _FORWARDED)
        )

    def _check_client(self, exchange: Exchange) -> None:
        given = self._given(exchange)
        if self._admin_digests and _find(given, self._admin_digests) is not None:
            exchange.key = "admin"
            return
        if not self._digests:
            return
        if not given:
            raise Unauthorized(
                "An API key is needed: send `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )
        key = _find(given, self._digests)
        if key is None:
            raise Unauthorized("The API key is not one of this server's.")
        exchange.key = f"key {key.number}"
        # Of the key itself: keys come and go while the server runs, and their numbers change.
        exchange.owner = sha256(b"responses" + key.digest).hexdigest()[:32]
        if not self._share_kv:
            # Of the key itself, so that KV on disk is found again whatever the order of keys.
            exchange.salt = sha256(b"kv" + key.digest).digest()

    def _may_read(self, origin: str) -> bool:
        """Whether a page of this origin may read what the API answers."""
        if origin in self._origins or ("*" in self._origins and origin != "null"):
            return True
        if not self._guarded:
            return False
        parts = _split(origin)
        if parts is None or parts.scheme in _APP_SCHEMES:
            return parts is not None
        name = parts.hostname or ""
        local = name in self._names or is_loopback(name) or name.endswith(".localhost")
        return parts.scheme in ("http", "https") and local


def is_preflight(exchange: Exchange) -> bool:
    """Whether a browser asks what a page may send."""
    asked = exchange.header(b"access-control-request-method")
    return exchange.scope["method"] == "OPTIONS" and asked is not None


def cors_headers(origin: str) -> dict[str, str]:
    """What lets a page of this origin read an answer."""
    return {
        "access-control-allow-origin": origin,
        "access-control-expose-headers": _EXPOSED,
        "vary": "origin",
    }


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [sha256(key.encode()).digest() for key in keys]


def _sent_key(exchange: Exchange) -> str:
    scheme, _, token = (exchange.header(b"authorization") or "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else ""
    return given or exchange.header(b"x-api-key") or ""


def _find(digest: bytes | None, digests: Sequence[bytes]) -> _Key | None:
    """Which of the keys it is. Every key is compared, so that the time taken says nothing about
    which one was near."""
    matches = [hmac.compare_digest(digest or b"", known) for known in digests]
    if not any(matches):
        return None
    number = matches.index(True)
    return _Key(number + 1, digests[number])


# --- the server's own page -----------------------------------------------------------------------


def _cookie_name(exchange: Exchange) -> str:
    # Browsers send cookies to every port of a name; two servers of a machine have their own.
    port = (exchange.header(b"host") or "").rpartition(":")[2]
    return f"{_COOKIE}_{port}" if port.isascii() and port.isdigit() else _COOKIE


def _cookie(exchange: Exchange, token: str) -> str:
    cookie = f"{_cookie_name(exchange)}={token}; Path=/; HttpOnly; SameSite=Strict"
    # The page's own origin says whether there is TLS, here or at a proxy.
    secure = (exchange.header(b"origin") or "").startswith("https:")
    return f"{cookie}; Secure" if secure else cookie


def _token(exchange: Exchange) -> str:
    name = _cookie_name(exchange)
    for part in (exchange.header(b"cookie") or "").split(";"):
        key, _, value = part.strip().partition("=")
        if key == name:
            return value
    return ""


def _is_own_page(exchange: Exchange) -> bool:
    """Whether the server's own page sent it, or a person who typed the address."""
    if exchange.header(b"sec-fetch-site") not in (None, "same-origin", "none"):
        return False
    origin = exchange.header(b"origin")
    if origin is None:  # browsers name it in whatever is not GET or HEAD
        return exchange.scope["method"] in ("GET", "HEAD")
    return _is_own(origin, exchange.header(b"host"))


def _is_browser(exchange: Exchange) -> bool:
    return any(exchange.header(name) for name in (b"origin", b"sec-fetch-site"))


def _check_fetch(exchange: Exchange) -> None:
    """Refuse what another page embeds: browsers name no Origin then, but say that it is another's.
    A link that a person follows is none."""
    site = exchange.header(b"sec-fetch-site")
    followed = (
        exchange.scope["method"] in ("GET", "HEAD")
        and exchange.header(b"sec-fetch-mode") == "navigate"
        and exchange.header(b"sec-fetch-dest") in (None, "document")
    )
    if site in ("cross-site", "same-site") and not followed:
        raise Forbidden("A page of another origin may not use this server so.")


# --- names --------------------------------------------------------------------------------------


def _is_own(origin: str, host: str | None) -> bool:
    """Whether a page came from this server itself, under the name by which it is asked now."""
    parts, own = _split(origin), (host or "").lower()
    return parts is not None and parts.scheme in ("http", "https") and parts.netloc.lower() == own


def _hostname(address: str) -> str | None:
    parts = _split(address)
    return None if parts is None else parts.hostname


def _split(address: str) -> SplitResult | None:
    try:
        return urlsplit(address)
    except ValueError:
        return None
