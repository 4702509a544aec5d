"""`/web/session`: what a browser may do here, and signing in and out.

A key comes in a body and goes into no answer, cookie, address or log; the cookie holds a random
token that only the server can read anything from.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from penstock import __version__
from penstock.errors import Unauthorized
from penstock.server.http.access import Door
from penstock.server.http.exchange import decode_json

if TYPE_CHECKING:
    from penstock.server.http.exchange import Exchange
    from penstock.server.protocols.services import Services


# A wrong key is answered after this long, so that a person's browser is no place to guess keys in.
WRONG_KEY_S = 1.0


class KeyFields(msgspec.Struct):
    """The body of signing in."""

    key: str


_decoder = msgspec.json.Decoder(KeyFields)


async def show(exchange: Exchange, services: Services) -> None:
    """Which pages to show, and whether a key would open more."""
    config = services.config
    role, why = Door(config, services.sessions).role(exchange)
    unnamed = "admin" if role == "admin" and config.server.admin_keys else None
    answer = {
        "version": __version__,
        "dashboard": config.server.dashboard,
        "needs_key": bool(config.server.api_keys or config.server.admin_keys),
        "role": role,
        "why": why,
        "key": exchange.key or unnamed,
        "default_model": config.models.default,
    }
    await exchange.send_json(answer, headers={"cache-control": "no-store"})


async def sign_in(exchange: Exchange, services: Services) -> None:
    """A cookie for a key."""
    async with services.sessions.signing_in(), exchange.body() as body:
        fields = await decode_json(_decoder, body)
    try:
        cookie = Door(services.config, services.sessions).sign_in(exchange, fields.key)
    except Unauthorized:
        await asyncio.sleep(WRONG_KEY_S)
        raise
    await _send(exchange, services, cookie)


async def sign_out(exchange: Exchange, services: Services) -> None:
    """The session ends, here and in the browser."""
    await _send(exchange, services, Door(services.config, services.sessions).sign_out(exchange))


async def _send(exchange: Exchange, services: Services, cookie: str) -> None:
    server = services.config.server
    answer = {"version": __version__, "dashboard": server.dashboard, "needs_key": True}
    await exchange.send_json(answer, headers={"cache-control": "no-store", "set-cookie": cookie})
