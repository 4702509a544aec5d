"""The protocol of a meter: reads the memory that steps hold."""

from __future__ import annotations

from typing import Protocol


class Committed(Protocol):
    """What has memory behind it apart from steps."""

    @property
    def committed_bytes(self) -> int:
        """So much."""


class NoKv:
    """Of an engine that keeps nothing between steps."""

    committed_bytes = 0


class Meter(Protocol):
    """What steps hold. Memory behind the KV arena is in no reading."""

    includes_host: bool  # what requests take on the host is in the readings
    noise_bytes: int  # two readings of the same step differ by about this much
    floor_bytes: int  # steps that take less than this are not told from each other

    def held(self) -> int:
        """Bytes held now."""

    def begin_step(self, rows: int) -> None:
        """A step of so many rows follows: what smaller ones have left must not come on top of it.
        Forget how high it went."""

    def mark(self) -> None:
        """Forget how high it went."""

    def peak(self) -> int:
        """The most held since `mark`."""

    def drop_caches(self) -> None:
        """Give freed memory that an allocator keeps back to the system."""
