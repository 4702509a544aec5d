"""New settings in a running server: checked, compared, and applied.

What a difference means is `config.compare`'s to say; this reads, checks, and puts in force. Those
that cannot be used change nothing.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from penstock import shapes
from penstock.config import ConfigError, compare
from penstock.errors import PenstockError
from penstock.server.http.peer import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.catalog import Catalog
    from penstock.config import Changes, Config, ModelsSettings, ServerSettings
    from penstock.server.protocols.services import Services

log = logging.getLogger(__name__)


async def reread(services: Services, overrides: Mapping[str, object] | None = None) -> Changes:
    """Read the settings again, with these overrides or those there are, and put in force what can
    be; raises why they cannot be used."""
    events = services.governor.events
    async with services.rereading:
        old = services.config
        try:
            read = old.read_again if overrides is None else partial(old.read_with, overrides)
            new = await asyncio.to_thread(read)
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
    await asyncio.to_thread(make_named, services.catalog, config.models)


def make_named(catalog: Catalog, settings: ModelsSettings) -> None:
    """Have the models that the operator names: the default must be there, and a `random:SHAPE` with
    a section of its own is made."""
    for name in settings.named:
        if name.startswith(shapes.PREFIX):
            try:
                catalog.make(name)
            except PenstockError as error:
                log.warning("the model %s of the settings is not there: %s", name, error.message)
    if settings.default is not None:
        catalog.make(settings.canonical(settings.default))


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
