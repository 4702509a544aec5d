"""How many bytes of images may be on their way into one worker: what it has booked for them.

Whoever comes first goes first. A file counts until the first word of its answer, by when it has
been encoded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from penstock.wire import Media


class ImageFiles:
    """The room of one worker; used on the event loop only."""

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def held(self, media: Sequence[Media]) -> AsyncIterator[HeldFiles]:
        """Room for the files of a request, until they are given back or the block ends."""
        size = sum(len(image.data) for image in media)
        if size:
            await self._take(size)
        files = HeldFiles(self, size)
        try:
            yield files
        finally:
            files.give()

    async def _take(self, size: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((size, turn))
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(size)
            else:
                self._line.remove((size, turn))
                self._serve()
            raise

    def _serve(self) -> None:
        # One request alone may have whatever it was let in with: limits may have changed since.
        while self._line and (
            not self.used_bytes or self.used_bytes + self._line[0][0] <= self.limit_bytes
        ):
            size, turn = self._line.popleft()
            self.used_bytes += size
            turn.set_result(None)

    def give(self, size: int) -> None:
        """So much less is on its way."""
        self.used_bytes -= size
        self._serve()


class HeldFiles:
    """What one request holds of it."""

    def __init__(self, files: ImageFiles, size: int) -> None:
        self._files = files
        self._size = size

    def give(self) -> None:
        """Give it back, once."""
        size, self._size = self._size, 0
        if size:
            self._files.give(size)
