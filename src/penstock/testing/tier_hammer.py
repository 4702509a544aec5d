"""A process that saves and loads blocks as fast as it can, until it is killed.

    python -m penstock.testing.tier_hammer DIRECTORY LIMIT_BYTES FINGERPRINT

Prints one line once its first blocks are on disk, and ends with an error if a load ever gives
anything but what belongs to the key.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from penstock.tiers import DiskTier, Payload, Quota, Writer

KEYS = 400
_STATE_BYTES = 1000


def key_of(number: int) -> bytes:
    """The keys are the same for every model; what is under them is not."""
    return number.to_bytes(32, "big")


def block_of(fingerprint: str, number: int) -> list[Payload]:
    """What belongs there: from 20 to 220 kB of attention, and a recurrent state."""
    source = random.Random(f"{fingerprint} {number}")
    return [
        Payload("attention", source.randbytes(20_000 + 500 * number)),
        Payload("recurrent", source.randbytes(_STATE_BYTES)),
    ]


def is_right(tier: DiskTier, fingerprint: str, number: int) -> bool | None:
    """None for a miss; a hit is right or wrong."""
    expected = block_of(fingerprint, number)
    into = [Payload(p.kind, bytearray(p.data.nbytes)) for p in expected]
    if not tier.load(key_of(number), into):
        return None
    return [p.data for p in into] == [p.data for p in expected]


def main(directory: str, limit_bytes: str, fingerprint: str) -> None:
    tier = DiskTier(Path(directory), Quota(int(limit_bytes)), fingerprint)
    writer = Writer(tier, 4 << 20)
    source = random.Random()
    for step in range(10**9):
        number = source.randrange(KEYS)
        writer.offer(key_of(number), block_of(fingerprint, number), lambda outcome: None)
        if step == 20:
            writer.flush(10)
            print("writing", flush=True)  # noqa: T201 - the parent waits for it
        if step % 5 == 0 and is_right(tier, fingerprint, source.randrange(KEYS)) is False:
            sys.exit("a load gave something else than was saved")


if __name__ == "__main__":
    main(*sys.argv[1:])
