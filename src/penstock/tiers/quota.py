"""How many bytes the disk tier may hold, over all models."""

from __future__ import annotations

from dataclasses import dataclass

# With a size given in bytes, so much of what would be free without us at most.
_MAX_SHARE = 0.9
_AUTO_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Quota:
    """The smaller of a number of bytes and a share of the disk that is free but for our files."""

    limit_bytes: int | None
    share: float = _MAX_SHARE

    @classmethod
    def parse(cls, text: str) -> Quota:
        """From the setting `cache.size`, which has been checked: `auto`, `10%` or bytes."""
        if text == "auto":
            return cls(None, _AUTO_SHARE)
        if text.endswith("%"):
            return cls(None, float(text[:-1]) / 100)
        return cls(int(text))

    @property
    def off(self) -> bool:
        """Nothing is to be kept at all."""
        return self.limit_bytes == 0

    def bytes(self, free_bytes: int, held_bytes: int) -> int:
        """What may be held now."""
        by_share = int(self.share * (free_bytes + held_bytes))
        return by_share if self.limit_bytes is None else min(self.limit_bytes, by_share)
