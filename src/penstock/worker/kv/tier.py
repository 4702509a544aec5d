"""The interface of a KV tier (RAM, disk), by layer group and block key; `Tier` keeps nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Find = Callable[[int, bytes], int | None]  # where a group's block lies now; None: it is gone


class Fetch(Protocol):
    """Blocks of one group on their way to a sequence, in order."""

    landed: int  # blocks in their place, from the first on

    @property
    def done(self) -> bool:
        """No more will come."""


class Tier:
    """What KV in host memory and on disk is to the cache; here, nothing is kept elsewhere."""

    @property
    def limit_bytes(self) -> int:
        """What it may hold of host memory, or still holds."""
        return 0

    @property
    def queue_bytes(self) -> int:
        """Of the buffers that are always there."""
        return 0

    def start(self) -> None:
        """Begin with what goes on beside steps."""

    def close(self, find: Find) -> None:
        """Save what can be saved in the time that a shutdown has."""

    def grant(self, size_bytes: int) -> None:
        """Hold so much of host memory from now on."""

    def trim(self) -> None:
        """Give back what could not be given when it was asked for."""

    def notices(self) -> list[str]:
        """What people should know that has not been told yet."""
        return []

    def stats(self) -> dict[str, float]:
        """Figures, for those who watch."""
        return {}

    def computed(self, tokens: int, seconds: float) -> None:
        """A step of so many prompt tokens took so long."""

    def keep(self, group: int, key: bytes) -> None:
        """A block is computed: it is worth keeping."""

    def offer(self, find: Find) -> bool:
        """Keep what there is room for; whether more is left to do."""
        return False

    def covers(self, group: int, keys: list[bytes]) -> list[bool]:
        """Which blocks are sooner brought than computed."""
        return [False] * len(keys)

    def fetch(self, group: int, keys: list[bytes], blocks: list[int]) -> Fetch:
        """Have blocks brought to their places, in order."""
        raise AssertionError("nothing is kept that could be fetched")

    def drop(self, group: int, fetch: Fetch) -> None:
        """What has not arrived is of no use any more."""

    def touch(self, group: int, keys: list[bytes]) -> None:
        """A sequence has used these until now, in the order of its tokens."""

    def deliver(self) -> None:
        """Put what has come since the last call in its place."""

    def wait(self, seconds: float) -> None:
        """Until something arrives."""

    def fence(self, group: int, blocks: Iterable[int]) -> None:
        """A step is about to write these: it must not meet a copy."""

    def before_moves(self) -> None:
        """Wait for what is under way: blocks are about to move."""

    def moved(self, group: int, moves: dict[int, int]) -> None:
        """Blocks have been copied elsewhere: old number to new."""
