"""A pull's working place: everything is built aside and appears under its name in one rename.

    models/.pull/SLUG.lock      held while a pull of that source runs, by it and its children
    models/.pull/SLUG/download  what was fetched; kept after a failure, so that it can be resumed
    models/.pull/SLUG/model     the folder being built; of no use to anybody once its pull is gone

A pull that is killed leaves nothing that the catalog can see. The next one, of whatever source,
removes what it was building, and the next of the same source goes on from what was fetched. What
makes a model of another one works in the same place.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.config.private import FILE
from penstock.errors import PenstockError, PullFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Progress = Callable[[str, int, int], None]  # phase, bytes done, bytes in all (0: unknown)

_KEEP_S = 7 * 24 * 3600  # how long the remains of an abandoned pull may wait to be resumed
_SPARE_BYTES = 64 << 20  # left free on the disk besides what a pull needs
_POLL_S = 0.25
# The children of a killed pull notice within moments and let go of the lock.
LOCK_WAIT_S = 5.0


class Staging:
    """One running pull's folders; use as a context manager. `busy` is what happens if another has
    them."""

    def __init__(self, models: Path, source: str, busy: PenstockError | None = None) -> None:
        self.models = models
        readable = re.sub(r"[^\w.-]+", "-", source)[-60:].strip("-.")
        self._slug = f"{readable}-{hashlib.sha256(source.encode()).hexdigest()[:12]}"
        self._busy = busy or PullFailed(
            f"Another pull of {source} is running; wait until it has ended."
        )
        self._root = models / ".pull" / self._slug
        self._lock_fd: int | None = None
        self.download = self._root / "download"
        self.model = self._root / "model"

    @property
    def lock_fd(self) -> int:
        """The lock, for children that write here: it stays held until the last of them is gone."""
        assert self._lock_fd is not None
        return self._lock_fd

    def __enter__(self) -> Staging:
        self._root.mkdir(parents=True, exist_ok=True)
        lock_file = self._root.with_name(f"{self._slug}.lock")
        deadline = time.monotonic() + LOCK_WAIT_S
        while (lock_fd := _try_lock(lock_file)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self._lock_fd = lock_fd
        if lock_fd is None:
            raise self._busy
        _sweep(self._root.parent, keep=self._root)
        self._root.mkdir(exist_ok=True)
        shutil.rmtree(self.model, ignore_errors=True)
        self.model.mkdir()
        self.download.mkdir(exist_ok=True)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        shutil.rmtree(self.model, ignore_errors=True)
        if kind is None:
            shutil.rmtree(self._root, ignore_errors=True)
        os.close(self.lock_fd)
        self._lock_fd = None

    def publish(self, name: str) -> Path:
        """Make the built folder the model `name`, durably; an unusable older one is replaced."""
        final = self.models / name
        final.parent.mkdir(parents=True, exist_ok=True)
        _sync_tree(self.model)
        if final.exists():
            final.rename(self._root / "replaced")
        self.model.rename(final)
        _sync(final.parent)
        return final


def _try_lock(path: Path) -> int | None:
    """An open descriptor that holds the lock file, or None if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _sweep(pulls: Path, keep: Path) -> None:
    """Remove what pulls that were killed were building, and what they fetched if it is long ago."""
    for folder in pulls.iterdir():
        if folder == keep or not folder.is_dir():
            continue
        lock_fd = _try_lock(folder.with_name(f"{folder.name}.lock"))
        if lock_fd is None:
            continue
        is_old = time.time() - folder.stat().st_mtime >= _KEEP_S
        fetched = any((folder / "download").glob("*"))
        shutil.rmtree(folder / "model" if fetched and not is_old else folder, ignore_errors=True)
        os.close(lock_fd)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def folder_bytes(folder: Path) -> int:
    """Bytes of the files below `folder`; files that vanish meanwhile do not count."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(root, name)).st_size  # noqa: PTH118 - hot loop
            except OSError:
                continue
    return total


@contextmanager
def watched(folder: Path, phase: str, total: int, progress: Progress) -> Iterator[None]:
    """Report how much `folder` grows while the body runs."""
    before = folder_bytes(folder)
    stop = threading.Event()

    def report() -> None:
        while not stop.wait(_POLL_S):
            grown = max(0, folder_bytes(folder) - before)
            progress(phase, min(grown, total) if total else grown, total)

    progress(phase, 0, total)
    reporter = threading.Thread(target=report, name=f"pull-{phase}", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        stop.set()
        reporter.join()


def require_disk(folder: Path, need_bytes: int, what: str) -> None:
    """Refuse before writing when `folder`'s disk has no room for `need_bytes` more."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < need_bytes + _SPARE_BYTES:
        raise PullFailed(
            f"{what} needs {need_bytes} bytes and {_SPARE_BYTES} to spare, but the disk of "
            f"{folder} has {free_bytes} bytes free; make room or set PENSTOCK_HOME."
        )
