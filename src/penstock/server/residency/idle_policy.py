"""Idle models over time: those past their ttl are unloaded unless pinned. Those whose settings have
changed are loaded again, and so, once, are those of which a better profile was measured meanwhile.

Driven by the governor's clock, it looks and begins; the unloading itself is `residency`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from penstock.config import reload_keys
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from penstock.memory.events import Events
    from penstock.server.residency.residency import Residency

log = logging.getLogger(__name__)

RELOAD_IDLE_S = 20.0  # without a request, before a model is loaded again for its profile


class IdlePolicy:
    """The models of one server, looked after."""

    def __init__(self, residency: Residency, events: Events) -> None:
        self._residency = residency
        self._events = events
        self._work: dict[str, asyncio.Task[object]] = {}  # in progress, by model
        self._profiled: set[str] = set()  # loaded again for their profile; never twice

    def turn(self) -> None:
        """Look at every loaded model; never waits."""
        for name, model in self._residency.loaded_models().items():
            if name in self._work or not model.usage().idle:
                continue
            settings = self._residency.settings.settings(name)
            idle_s = time.monotonic() - model.used_at
            assert model.grant is not None
            if keys := reload_keys(model.grant.plan.settings, settings):
                self._events.add("reload", model=name, changed=keys)
                self._begin(name, self._reload(name))
            elif (
                model.client.status is not None
                and model.client.status.wants_reload
                and idle_s >= RELOAD_IDLE_S
                and name not in self._profiled
            ):
                self._profiled.add(name)
                self._events.add("reload", model=name, changed=("profile",))
                self._begin(name, self._reload(name, reason="profile"))
            elif (
                (ttl_s := model.ttl_s(settings)) is not None
                and not model.pinned
                and idle_s >= ttl_s
            ):
                self._begin(name, self._residency.unload(name, reason="ttl"))

    def _begin(self, name: str, work: Coroutine[None, None, object]) -> None:
        task = self._work[name] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self._work.pop(name))

    async def _reload(self, name: str, reason: str = "settings") -> None:
        await self._residency.unload(name, reason=reason)
        try:
            await self._residency.load(name)
        except PenstockError as error:
            log.error("%s is not loaded anew: %s", name, error.message)
