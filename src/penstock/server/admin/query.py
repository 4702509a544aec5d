"""Query parameters of a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

if TYPE_CHECKING:
    from penstock.server.http.exchange import Exchange


def query_of(exchange: Exchange) -> dict[str, str]:
    """Its fields; of two alike the later counts."""
    return dict(parse_qsl(exchange.scope.get("query_string", b"").decode("latin-1")))
