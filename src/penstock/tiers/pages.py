"""Drops cache files from the page cache, for a process whose control group has little memory.

What is written and read passes through the page cache and stays there, while there is room. That
makes the next read fast. But in a group with a limit it fills all that is left of it, and from then
on the kernel must find a page to drop at every charge: one of ours, or one of the weights.

A page can be dropped when it is on the disk. So a file that has been written is only started on its
way there, and is dropped some files later, when it has arrived. If it has not by then, the disk is
slower than the writer, who has to wait: otherwise the memory would fill as before.

Whether a process is in such a group is not known here.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING

from penstock.tiers.files import READ

if TYPE_CHECKING:
    from penstock.tiers.files import Files

_FILES_BEHIND = 8


class Pages:
    """The pages of the files that a tier writes and reads; without `frugal` they are left alone.

    Nothing here raises: it is for good manners, and the files are as good without.
    """

    def __init__(self, files: Files, *, frugal: bool) -> None:
        self._files = files
        self.frugal = frugal
        self._on_their_way: deque[str] = deque()

    def done(self, descriptor: int) -> None:
        """Nothing more will be read from this file, or written to it."""
        if self.frugal:
            with contextlib.suppress(OSError):
                self._files.drop_pages(descriptor)

    def saved(self, name: str) -> None:
        """It was written, is done and has its name; this may wait for one before it."""
        if self.frugal:
            self._on_their_way.append(name)
            self.drop_saved(_FILES_BEHIND)

    def drop_saved(self, but: int = 0) -> None:
        """Drop all that was saved, but for the last files."""
        while len(self._on_their_way) > but:
            with contextlib.suppress(OSError):  # it may be gone by now
                descriptor = self._files.open(self._on_their_way.popleft(), READ)
                try:
                    self._files.wait_written(descriptor)
                    self._files.drop_pages(descriptor)
                finally:
                    self._files.close(descriptor)
