"""The bytes of every file in the cache directory, counted once for all processes that share it.

The file `usage` holds the count, and its lock is the right to change any name in the directory.
Whoever holds the lock

    - adds a file's bytes to the count before the file exists,
    - takes them off after it is gone, and only if it was the one who removed it,

so a kill or a failing disk between any two calls leaves a count that is too high, never too low.
With the count stands the directory's time of change: if it differs from the directory's own, a
name was changed without the count (a kill, another program, a person), and all is counted anew.

A file is created with its full size and locked by its writer while it is incomplete. So a listing
alone gives the true count, and an incomplete file whose lock is free belongs to nobody alive.
"""

from __future__ import annotations

import contextlib
import errno
import struct
import time
import zlib
from typing import TYPE_CHECKING

from penstock.tiers.files import CREATE, READ, UPDATE
from penstock.tiers.format import is_part, space

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.tiers.files import Files, Found

RECORD_NAME = "usage"
LOCK_WAIT_S = 5.0  # longer than anybody keeps it, unless stopped or on a disk that hangs
_LOCK_POLLS_S = (0.0002, 0.01)  # at first, and at most
_RECORD = struct.Struct("<8sQqqI")  # magic, bytes held, directory mark, cleared at, crc
_MAGIC = b"penstkUS"


class Books:
    """The count while its lock is held; every change of a name goes through here."""

    def __init__(self, files: Files, descriptor: int) -> None:
        self._files = files
        self._descriptor = descriptor
        self.held_bytes = 0
        self.cleared_ns = 0  # when the directory was last cleared
        self.mark = 0  # the directory's, as last written with the count
        # What is in the directory, when it had to be listed.
        self.listing: list[Found] | None = None
        self._read()

    def recount(self) -> list[Found]:
        """List the directory, remove what dead writers left, and count all the rest."""
        self.listing = listing = [
            found
            for found in self._files.list()
            if not (is_part(found.name) and self._remove_if_dead(found.name))
        ]
        self.held_bytes = space(_RECORD.size) + sum(
            space(found.size) for found in listing if found.name != RECORD_NAME
        )
        return listing

    def create(self, name: str, size: int) -> int:
        """A locked new file of that size; its descriptor."""
        self.held_bytes += space(size)
        self._write()
        try:
            descriptor = self._files.open(name, CREATE)
        except OSError:
            self.held_bytes -= space(size)
            raise
        try:
            # Nobody else can hold it: the name is new, and we hold the directory's lock.
            self._files.try_lock(descriptor)
            self._files.allocate(descriptor, size)
        except Exception:
            with contextlib.suppress(OSError):
                self.unlink(name, size)
            self._files.close(descriptor)
            raise
        return descriptor

    def unlink(self, name: str, size: int) -> bool:
        """Remove a file that has been counted with `size`; False if it was not there."""
        try:
            self._files.unlink(name)
        except FileNotFoundError:
            return False
        self.held_bytes = max(0, self.held_bytes - space(size))
        return True

    def mark_cleared(self) -> None:
        """What was offered until now must not be written; OSError if that cannot be kept."""
        self.cleared_ns = time.time_ns()
        self._write()

    def save(self) -> None:
        """Write the count with the directory's mark.

        Failing is no harm: the old count is not too low, and its mark no longer fits.
        """
        with contextlib.suppress(OSError):
            self._write()

    def _read(self) -> None:
        buffer = bytearray(_RECORD.size)
        if self._files.read(self._descriptor, [memoryview(buffer)], 0) == _RECORD.size:
            magic, held, mark, cleared_ns, crc = _RECORD.unpack(buffer)
            if magic == _MAGIC and crc == zlib.crc32(buffer[:-4]):
                self.held_bytes, self.mark, self.cleared_ns = held, mark, cleared_ns
                if mark == self._files.directory_mark():
                    return
        self.recount()

    def _write(self) -> None:
        mark = self._files.directory_mark()
        content = _RECORD.pack(_MAGIC, self.held_bytes, mark, self.cleared_ns, 0)[:-4]
        record = content + struct.pack("<I", zlib.crc32(content))
        if self._files.write(self._descriptor, record, 0) != len(record):
            raise OSError(errno.EIO, "the count of the cache directory was not written whole")
        self.mark = mark

    def _remove_if_dead(self, name: str) -> bool:
        try:
            descriptor = self._files.open(name, READ)
        except OSError:
            return False
        try:
            if not self._files.try_lock(descriptor):
                return False
            self._files.unlink(name)
        except OSError:
            return False
        finally:
            self._files.close(descriptor)
        return True


@contextlib.contextmanager
def locked(files: Files) -> Iterator[Books]:
    """The books of the directory, which is made if it is not there; OSError if that cannot be."""
    descriptor = _acquire(files, time.monotonic() + LOCK_WAIT_S)
    try:
        books = Books(files, descriptor)
        try:
            yield books
        finally:
            books.save()
    finally:
        files.close(descriptor)


def _acquire(files: Files, deadline: float) -> int:
    while True:
        try:
            descriptor = files.open(RECORD_NAME, UPDATE)
        except FileNotFoundError:
            files.make_directory()
            descriptor = files.open(RECORD_NAME, UPDATE)
        try:
            pause_s, longest_s = _LOCK_POLLS_S
            while not files.try_lock(descriptor):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        errno.ETIMEDOUT, "another process keeps the lock of the cache directory"
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
            # It may have been removed while we waited: then it locks nothing.
            if _same_file(files, descriptor):
                return descriptor
        except BaseException:
            files.close(descriptor)
            raise
        files.close(descriptor)


def _same_file(files: Files, descriptor: int) -> bool:
    try:
        there = files.status(RECORD_NAME)
    except FileNotFoundError:
        return False
    here = files.status_of(descriptor)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
