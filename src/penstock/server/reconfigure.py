"""Settings in a running server: which cannot be served at all, and what becomes of new ones.

What a difference means is `config.compare`'s to say; this reads, checks, and puts in force. Those
that cannot be used change nothing.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from penstock.config import ConfigError, compare
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.config import Changes, Config, ModelsSettings, ServerSettings
    from penstock.server.api.services import Services

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


async def reread(services: Services) -> Changes:
    """Read the settings again and put in force what can be; raises why they cannot be used."""
    events = services.governor.events
    async with services.rereading:
        old = services.config
        try:
            new = await asyncio.to_thread(old.read_again)
            changes = compare(old, new, services.residency.workers())
            await _check(changes.config, services)
        except PenstockError as error:
            events.add("settings refused", reason=error.message)
            raise
        services.config = changes.config
        services.residency.reconfigure(changes.config.models)
        events.add(
            "settings read",
            applied=changes.applied,
            reload=dict(changes.reload),
            restart=changes.restart,
        )
    return changes


async def _check(config: Config, services: Services) -> None:
    check_exposure(config.server)
    check_names(config.models, await asyncio.to_thread(services.catalog.scan))
    if (default := config.models.default) is not None:
        await asyncio.to_thread(services.catalog.find, config.models.canonical(default))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    return host in LOOPBACK_NAMES or bool(re.fullmatch(r"127(\.\d{1,3}){3}", host))


def check_exposure(settings: ServerSettings) -> None:
    """Refuse to serve other machines without a key, unless that is wanted."""
    if settings.api_keys or settings.no_auth or is_loopback(settings.host):
        return
    raise ConfigError(
        f"The address {settings.host} can be reached from other machines, and there is no API "
        "key. Give one with --api-key KEY, or say --no-auth if anyone may use this server."
    )


def check_names(settings: ModelsSettings, names: Iterable[str]) -> None:
    """Refuse an alias that is the name of a model on disk. One that comes to be there later is
    hidden by the alias instead, so that clients go on reaching what they did."""
    for sentence in settings.hidden(names).values():
        raise ConfigError(
            f"Two models would have one name: {sentence}, and there is a model of that name on "
            "disk. Choose another alias."
        )
