"""Everything that penstock writes is its user's alone.

Conversations, KV and logs say what people asked. Each process takes `UMASK` before it writes
anything, so that a file is private from its first byte, whichever library creates it, and so are
those that SQLite puts beside its own. Where a file is created by us, it is with `FILE` as well.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

UMASK = 0o077
FOLDER = 0o700
FILE = 0o600


def keep_private() -> None:
    """Whatever this process and its children create from now on is for its user only."""
    os.umask(UMASK)


def make_folder(folder: Path) -> None:
    """Have it and those above it; what was there keeps its mode."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=FOLDER, exist_ok=True)
    folder.mkdir(exist_ok=True)  # says what is wrong if it is no folder


def opener(path: str, flags: int) -> int:
    """For `open`: a file that does not exist is created private."""
    return os.open(path, flags, FILE)
