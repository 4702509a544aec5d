"""Fairness between callers: what each was served, how much of something each may hold, and slots
that they take in rotation.

A caller is who has shown an API key; where none is needed, an address or a network (`Exchange`).

Counters of tokens follow "Fairness in Serving Large Language Models" (Sheng et al., 2024): a prompt
is charged when it starts, and given back if no token of an answer ever came; an answer's tokens are
charged as they come; a caller who returns gets no credit for the time it was away.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

_GUARANTEED_SHARE = 4  # one part in so many is divided among the keys, the rest is anybody's
# Where no key is needed nobody knows how many callers there will be: for so many something is kept.
OPEN_CALLERS = 16


@dataclass(frozen=True, slots=True)
class Callers:
    """How many callers there may be: as many as there are keys, or anybody."""

    expected: int = 1
    anybody: bool = False

    @property
    def several(self) -> bool:
        """Whether there may be more than one."""
        return self.anybody or self.expected > 1


def callers(keys: int, *, local: bool) -> Callers:
    """Of a server with so many keys; one that only its own machine reaches has one without."""
    if keys or local:
        return Callers(max(1, keys))
    return Callers(OPEN_CALLERS, anybody=True)


class ServedTokens:
    """Tokens that each key was served, while anybody is there to compare with."""

    def __init__(self) -> None:
        self._requests: dict[str, int] = {}  # by key, of those that have any
        self._served: dict[str, int] = {}

    def enter(self, key: str) -> None:
        """One more of the key's requests is here."""
        if key not in self._requests:
            least = min((self._served[other] for other in self._requests), default=0)
            self._served[key] = max(self._served.get(key, 0), least)
        self._requests[key] = self._requests.get(key, 0) + 1

    def leave(self, key: str) -> None:
        """One of them is gone; what a key owes is kept while it matters to somebody."""
        self._requests[key] -= 1
        if self._requests[key]:
            return
        del self._requests[key]
        least = min((self._served[other] for other in self._requests), default=None)
        for other in [k for k in self._served if k not in self._requests]:
            if least is None or self._served[other] <= least:
                del self._served[other]

    def charge(self, key: str, tokens: int) -> None:
        """The key was served so many more; fewer than none where some turned out not to be
        computed for it."""
        self._served[key] += tokens

    def of(self, key: str) -> int:
        """What a key that is here was served."""
        return self._served[key]

    def check(self) -> None:
        """Everyone here has a counter, and nobody owes less than nothing."""
        assert self._requests.keys() <= self._served.keys()
        assert all(count > 0 for count in self._requests.values())
        assert self._requests or not self._served


def guaranteed(total: int, keys: int) -> int:
    """What each of `keys` can have of `total`, whatever the others do."""
    return total // (_GUARANTEED_SHARE * keys)


def left_for(key: str, total: int, held: Mapping[str, int], each: int, keys: int) -> int:
    """What a key may have of `total` beside what is `held`: all that is free, but for what the
    other keys are still to have of their `each`. As long as all keep to this, one who has less than
    `each` finds the rest of it free."""
    others = [size for other, size in held.items() if other != key and size]
    kept = each * max(0, keys - 1 - len(others)) + sum(max(0, each - size) for size in others)
    return total - sum(held.values()) - kept


class FairSlots:
    """So many places; callers who wait get them in rotation. Used on the event loop only."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # who is next comes first

    @property
    def waiting(self) -> int:
        """Those who wait for a place."""
        return sum(map(len, self._lines.values()))

    @asynccontextmanager
    async def place(self, caller: str) -> AsyncIterator[None]:
        """Hold a place; waits for it."""
        await self._take(caller)
        try:
            yield
        finally:
            self._give()

    async def _take(self, caller: str) -> None:
        if self._free:
            self._free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._lines.setdefault(caller, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._give()  # given in the same moment
            elif caller in self._lines and place in self._lines[caller]:
                self._lines[caller].remove(place)
                if not self._lines[caller]:
                    del self._lines[caller]
            raise

    def _give(self) -> None:
        while self._lines:
            caller = next(iter(self._lines))
            line = self._lines.pop(caller)
            place = line.popleft()
            if line:
                self._lines[caller] = line  # behind the other callers
            if not place.done():
                place.set_result(None)
                return
        self._free += 1
