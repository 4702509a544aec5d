"""The rows of images, kept by what was in their files: bounded, and never given up while needed."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class _Entry:
    rows: Tensor  # [levels, tokens, hidden]
    holders: int = 0


class RowCache:
    """Rows by digest. Those of requests that are here stay; of the others the least recently used
    make way."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the latest used is last

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    def rows(self, digest: bytes) -> Tensor:
        """Of an image that somebody holds."""
        return self._entries[digest].rows

    def hold(self, digest: bytes) -> None:
        """One request more needs it."""
        self._entries[digest].holders += 1
        self._entries.move_to_end(digest)

    def give(self, digest: bytes) -> None:
        """One less."""
        entry = self._entries[digest]
        assert entry.holders > 0, "nobody holds it"
        entry.holders -= 1

    def has_room(self, size: int) -> bool:
        """Whether so much more can be kept, without what nobody needs."""
        held = sum(entry.rows.nbytes for entry in self._entries.values() if entry.holders)
        return held + size <= self.limit_bytes

    def make_room(self, size: int) -> bool:
        """Whether so much more can be kept; what nobody needs is let go of for it."""
        idle = [digest for digest, entry in self._entries.items() if not entry.holders]
        for digest in idle:
            if self.used_bytes + size <= self.limit_bytes:
                break
            self.used_bytes -= self._entries.pop(digest).rows.nbytes
        return self.used_bytes + size <= self.limit_bytes

    def insert(self, digest: bytes, rows: Tensor) -> None:
        """Room was made for it."""
        assert digest not in self._entries, "it is there already"
        self._entries[digest] = _Entry(rows)
        self.used_bytes += rows.nbytes

    def check(self, held: dict[bytes, int]) -> None:
        """Holders and bytes are counted right."""
        holders = {d: entry.holders for d, entry in self._entries.items() if entry.holders}
        assert holders == held, "holders are miscounted"
        assert self.used_bytes == sum(entry.rows.nbytes for entry in self._entries.values())
