"""What KV is a function of, beside tokens: a digest of the content of a model's files.

Reading gigabytes takes seconds, so each file's digest is remembered with its size and times.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_PIECE_BYTES = 1 << 20
_SUFFIXES = (".safetensors", ".json")


def content_digest(folder: Path, remembered: Path) -> str:
    """A digest of all weights and configs in a folder; OSError if one cannot be read."""
    known = _read(remembered)
    files = sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES)
    whole = hashlib.blake2b(digest_size=16)
    changed = False
    for file in files:
        status = file.stat()
        name = str(file.resolve())
        seen = [status.st_size, status.st_mtime_ns, status.st_ino]
        if known.get(name, [])[1:] != seen:
            known[name] = [_digest(file), *seen]
            changed = True
        whole.update(f"{file.name} {known[name][0]}\n".encode())
    if changed:
        with contextlib.suppress(OSError):  # then it is computed again next time
            _write(remembered, known)
    return whole.hexdigest()


def _digest(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    failed: list[OSError] = []

    def read() -> None:
        # A model may be answering already: this thread takes what it leaves.
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            with file.open("rb") as stream:
                while piece := stream.read(_PIECE_BYTES):
                    digest.update(piece)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=read, name="digest", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return digest.hexdigest()


def _read(remembered: Path) -> dict[str, list[object]]:
    """What is remembered; nothing if that cannot be read, since it can be computed again."""
    try:
        known = json.loads(remembered.read_text())
    except (OSError, ValueError):
        return {}
    entries = known.items() if isinstance(known, dict) else ()
    return {name: entry for name, entry in entries if isinstance(entry, list) and len(entry) == 4}


def _write(remembered: Path, known: dict[str, list[object]]) -> None:
    temporary = remembered.with_suffix(f".{os.getpid()}")
    remembered.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(json.dumps(known))
    temporary.replace(remembered)
