"""Every system call of the disk tier, and nothing that decides: names inside one directory.

Tests put a class in its place that fails, writes short or stops dead at any call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# Nothing here follows a symbolic link, and a pipe in the place of a file does not make us wait.
_ALWAYS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
READ = os.O_RDONLY | _ALWAYS
UPDATE = os.O_RDWR | os.O_CREAT | _ALWAYS
CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | _ALWAYS


# Linux only, and not in Python. Its bytes alone: an fsync also waits for the file system's journal,
# with the bytes of whatever else is in it.
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
_WRITE_AND_WAIT = 1 | 2 | 4  # SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE, _WAIT_AFTER


@dataclass(frozen=True, slots=True)
class Found:
    """A file as a listing shows it; below a sub-directory the name has slashes."""

    name: str
    size: int
    modified_ns: int
    regular: bool = True


class Files:
    """One directory. Every method is a system call or a few, and raises OSError as they do."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def make_directory(self) -> None:
        """Make it, for its owner only; one that is there keeps its mode."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def directory_mark(self) -> int:
        """Changes whenever a name appears, disappears or is changed (to the clock's tick)."""
        return self.directory.stat().st_mtime_ns

    def free_bytes(self) -> int:
        """What this user may still write to the disk that it is on or would be made on."""
        there = next(p for p in (self.directory, *self.directory.parents) if p.exists())
        usage = os.statvfs(there)
        return usage.f_bavail * usage.f_frsize

    def list(self) -> list[Found]:
        """Everything in it that is no directory, at any depth; contents are not read."""
        found: list[Found] = []
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            try:
                entries = os.scandir(self.directory / folder)
            except OSError:
                if not folder:
                    raise
                continue  # another's folder that we may not read, or that has just gone
            with entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(f"{folder}{entry.name}/")
                            continue
                        status = entry.stat(follow_symlinks=False)
                        found.append(
                            Found(
                                f"{folder}{entry.name}",
                                status.st_size,
                                status.st_mtime_ns,
                                stat.S_ISREG(status.st_mode),
                            )
                        )
        return found

    def open(self, name: str, flags: int) -> int:
        return os.open(self._path(name), flags, 0o600)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def try_lock(self, descriptor: int) -> bool:
        """The exclusive lock of an open file; it ends with the descriptor, also by a kill."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def status(self, name: str) -> os.stat_result:
        return os.lstat(self._path(name))

    def status_of(self, descriptor: int) -> os.stat_result:
        return os.fstat(descriptor)

    def allocate(self, descriptor: int, size: int) -> None:
        """Give the file its size and its room on the disk, before anything is written."""
        try:
            os.posix_fallocate(descriptor, 0, size)
        except AttributeError:  # macOS: the size at least
            os.ftruncate(descriptor, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(descriptor, size)

    def write(self, descriptor: int, data: memoryview | bytes, offset: int) -> int:
        return os.pwrite(descriptor, data, offset)

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(descriptor, buffers, offset)

    def drop_pages(self, descriptor: int) -> None:
        """Start to write what is not on the disk yet, and drop from memory what is."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def wait_written(self, descriptor: int) -> None:
        """Until the file's bytes are on the disk, if not what the disk knows of the file."""
        if _sync_file_range is not None and _sync_file_range(descriptor, 0, 0, _WRITE_AND_WAIT):
            raise OSError(ctypes.get_errno(), "the file's bytes cannot be waited for")

    def rename(self, old: str, new: str) -> None:
        os.rename(self._path(old), self._path(new))  # noqa: PTH104 - beside its siblings

    def unlink(self, name: str) -> None:
        os.unlink(self._path(name))  # noqa: PTH108

    def touch(self, name: str, used_ns: int) -> None:
        os.utime(self._path(name), ns=(used_ns, used_ns), follow_symlinks=False)

    def _path(self, name: str) -> str:
        return f"{self.directory}/{name}"
