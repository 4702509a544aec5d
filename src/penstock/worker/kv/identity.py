"""The fingerprint of KV on disk: the model's files, and what else makes the same tokens' KV differ.

Reading gigabytes takes seconds, so each file's digest is remembered with its size and times. It is
taken while the model answers already: of files that are not those it was loaded from, there is
none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import transformers

import penstock

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.worker.kv.memory import KvMemory

_PIECE_BYTES = 1 << 20
_SUFFIXES = (".safetensors", ".gguf", ".json")


class FilesChanged(Exception):  # noqa: N818 - what has happened
    """A model's files are not any more what they were when it was loaded."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a model is made of, as it was at one moment."""

    folder: Path
    with_code: bool  # the model's own, which is run if it is trusted
    stamps: dict[str, tuple[int, int, int]]  # by name: size, time of the last change, inode

    @classmethod
    def now(cls, folder: Path, *, with_code: bool) -> ModelFiles:
        """To be taken before anything is read."""
        files = {file for file in folder.glob("*") if file.suffix in _SUFFIXES}
        files.update(folder.rglob("*.py") if with_code else ())
        stamps = {}
        for file in sorted(files):
            status = file.stat()
            stamp = status.st_size, status.st_mtime_ns, status.st_ino
            stamps[file.relative_to(folder).as_posix()] = stamp
        return cls(folder, with_code, stamps)

    def digest(self, remembered: Path) -> str:
        """Of the content of them all; OSError if one cannot be read, FilesChanged if one is not
        what it was."""
        known = _read(remembered)
        whole = hashlib.blake2b(digest_size=16)
        changed = False
        for name, stamp in self.stamps.items():
            file = self.folder / name
            path = str(file.resolve())
            if known.get(path, [])[1:] != [*stamp]:
                known[path] = [_digest(file), *stamp]
                changed = True
            whole.update(f"{name} {known[path][0]}\n".encode())
        # Behind the reading: so it was the same from before the load until here.
        if ModelFiles.now(self.folder, with_code=self.with_code) != self:
            raise FilesChanged("its files have changed since it was loaded")
        if changed:
            with contextlib.suppress(OSError):  # then it is computed again next time
                _write(remembered, known)
        return whole.hexdigest()


def numerics(memory: KvMemory, dtype: torch.dtype, processor: str, kernels: object) -> str:
    """By what the same files give other KV: the type that is computed in, how KV is kept, and all
    that may round differently or, where weights are random, make others."""
    return " ".join(
        (
            f"{dtype} {memory.format} {memory.block_tokens} {memory.layers} {memory.groups}",
            f"{processor} {type(kernels).__name__}",
            f"penstock {penstock.__version__} torch {torch.__version__}",
            f"transformers {transformers.__version__}",
        )
    )


def _digest(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    failed: list[Exception] = []

    def read() -> None:
        # A model may be answering already: this thread takes what it leaves.
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            with file.open("rb") as stream:
                while piece := stream.read(_PIECE_BYTES):
                    digest.update(piece)
        except (OSError, MemoryError) as error:  # of half a file there is no digest
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
