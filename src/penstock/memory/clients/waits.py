"""Requests that wait for slow clients, and which of them end when others need their memory.

A request waits for its client while it reads a body or writes an answer, and what is booked for it
stays booked. Its client has a least rate over the whole of it, so that this ends; until then it is
within its rights, unless others have waited for memory for a while. Then requests below the least
rate end, the grace not counted, and if these are too few, requests of clients that hold more than
an equal share and more than the one that waits would. Of several the one that has kept the most
bytes for longest. Knows bytes and seconds, not what is sent.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

PATIENCE_S = 1.0  # of who waits for memory, before others end for it
_SLOW_S = 5.0  # who was waited for less in all is not ended


class Limits(Protocol):
    """How slow a client may be."""

    @property
    def rate(self) -> int:
        """Bytes a second, at least."""

    def left_s(self, waited_s: float, moved_bytes: int) -> float:
        """How much longer it may be waited for."""


class Holder(Protocol):
    """Memory of a request."""

    client: str
    size: int


@dataclass(frozen=True, slots=True)
class Ended:
    """One that ended for others."""

    client: str
    held_bytes: int
    moved_bytes: int
    waited_s: float


class ClientWait:
    """How long one request has waited for its client so far, and for how many bytes."""

    def __init__(self, memory: Holder, limits: Limits, all_of_them: ClientWaits) -> None:
        self.memory = memory
        self.moved_bytes = 0
        self.ended = False  # for others
        self._limits = limits
        self._all = all_of_them
        self._before_s = 0.0  # waited until now, but for the present wait
        self._since: float | None = None
        self._deadline: asyncio.Timeout | None = None

    @property
    def waited_s(self) -> float:
        """In all."""
        return self._before_s + (0.0 if self._since is None else time.monotonic() - self._since)

    @property
    def is_slow(self) -> bool:
        """Whether fewer bytes came than must in such a time, were there no grace."""
        return self.moved_bytes < self._limits.rate * self.waited_s

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """While the client is waited for. `TimeoutError` when it is too slow, or `ended`."""
        left_s = self._limits.left_s(self._before_s, self.moved_bytes)
        try:
            async with asyncio.timeout(left_s) as self._deadline:
                self._since = time.monotonic()
                self._all.waiting[self] = None
                yield
        finally:
            self._before_s, self._since = self.waited_s, None
            self._all.waiting.pop(self, None)
            self._deadline = None
        if self.ended:  # in the moment in which the client moved
            raise TimeoutError

    def end(self) -> Ended:
        """The client is waited for no longer."""
        self.ended = True
        if self._deadline is not None:
            self._deadline.reschedule(asyncio.get_running_loop().time())
        return Ended(self.memory.client, self.memory.size, self.moved_bytes, self.waited_s)


class ClientWaits:
    """Those that wait at present, of all requests of one pool."""

    def __init__(self) -> None:
        self.waiting: dict[ClientWait, None] = {}
        self.on_end: Callable[[Ended], None] = lambda _: None

    def make_way(self, client: str, size: int, needed: int, held: Mapping[str, int]) -> None:
        """End requests that hold `needed` bytes or more, if there are such, for a client that wants
        `size` more; `held` says what each client has."""
        left = dict(held)
        share = sum(held.values()) / len(held.keys() | {client})
        while needed > 0:
            victim = self._victim(client, left.get(client, 0) + size, left, share)
            if victim is None:
                return
            ended = victim.end()
            del self.waiting[victim]
            needed -= ended.held_bytes
            left[ended.client] -= ended.held_bytes
            self.on_end(ended)

    def _victim(
        self, client: str, wanted: int, held: Mapping[str, int], share: float
    ) -> ClientWait | None:
        """Who ends next for a client that would have `wanted` in all."""
        some = [
            wait
            for wait in self.waiting
            if wait.waited_s >= _SLOW_S
            and wait.memory.size > 0
            and wait.memory.client != client
            and (wait.is_slow or held.get(wait.memory.client, 0) > max(share, wanted))
        ]
        return max(
            some, key=lambda wait: (wait.is_slow, wait.memory.size * wait.waited_s), default=None
        )
