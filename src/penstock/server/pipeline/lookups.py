"""Model names to cards: looked up on disk in a thread, and remembered for a while.

Any client may send any name. So a loaded model is answered for while it is looked for again, a name
that was not found is not looked for again at once, and of names that no model has only a few wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.catalog.scan import file_marks
from penstock.errors import PenstockError, UnknownModel
from penstock.server.http.threads import read_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.catalog import Card, Catalog
    from penstock.catalog.scan import Marks

_FOUND_S = 5.0  # a model that was just found is not looked for again
_MISSING_S = 1.0  # nor is one that was just not there
_MAX_MISSING = 256
MAX_UNKNOWN = 16  # look-ups in line, beyond which a name that no model had joins no more


@dataclass(frozen=True, slots=True)
class Found:
    """A model that was looked for."""

    at: float  # on the monotonic clock
    card: Card
    files: Marks
    usable: bool = True  # when it was looked for last


class LookUps:
    """The models of one server by name."""

    def __init__(self, catalog: Catalog, is_loaded: Callable[[str], bool]) -> None:
        self._catalog = catalog
        self._is_loaded = is_loaded
        self._found: dict[str, Found] = {}
        self._missing: dict[str, tuple[float, str]] = {}  # when, and the sentence
        self._again: set[asyncio.Task[None]] = set()

    async def card(self, name: str) -> Card:
        """The card of the model of that name."""
        now = time.monotonic()
        found = self._found.get(name)
        if found is not None and found.usable:
            if now - found.at < _FOUND_S:
                return found.card
            if self._is_loaded(name):
                self._found[name] = replace(found, at=now)
                self._look_again(name)
                return found.card
        at, message = self._missing.get(name, (-_MISSING_S, ""))
        if now - at < _MISSING_S:
            raise UnknownModel(message, param="model")
        return await self._look(name)

    def files(self, card: Card) -> Marks:
        """The files of a model that was found, as they were then."""
        return self._found[card.name].files

    def expect_new(self) -> None:
        """A model was just made or fetched."""
        self._missing.clear()

    def _look_again(self, name: str) -> None:
        async def look() -> None:
            with contextlib.suppress(PenstockError):  # the next who asks is told
                await self._look(name)

        task = asyncio.ensure_future(look())
        self._again.add(task)  # the loop itself keeps tasks only weakly
        task.add_done_callback(self._again.discard)

    async def _look(self, name: str) -> Card:
        known = name in self._catalog.names
        try:
            card, files = await read_files(
                (self._catalog, "find", name),
                partial(_read, self._catalog, name),
                max_waiting=None if known else MAX_UNKNOWN,
            )
        except PenstockError as error:
            error.param = "model" if isinstance(error, UnknownModel) else error.param
            if name in self._found:
                self._found[name] = replace(self._found[name], usable=False)
            if isinstance(error, UnknownModel):
                self._missing.pop(name, None)
                self._missing[name] = time.monotonic(), error.message
                if len(self._missing) > _MAX_MISSING:
                    del self._missing[next(iter(self._missing))]
            raise
        self._found[name] = Found(time.monotonic(), card, files)
        return card


def _read(catalog: Catalog, name: str) -> tuple[Card, Marks]:
    card = catalog.find(name)
    return card, file_marks(card.path)
