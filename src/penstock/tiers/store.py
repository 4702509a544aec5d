"""The cache directory as a whole: room for a new file, least recently used first over all models.

Knows names and sizes, not what is in the files (`disk.py`), nor who writes when (`writer.py`).

There is no fsync: what a crash of the machine leaves half-written fails its checksum and is
removed when it is next wanted, and a cache that must be filled again is no loss. A kill of the
process loses nothing that was renamed, since the kernel has it.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.tiers.contents import check_file, read_header
from penstock.tiers.files import READ, Files
from penstock.tiers.format import (
    BadBlock,
    is_part,
    name_of,
    parse_block_name,
    part_name,
    space,
    tag_of,
)
from penstock.tiers.index import Index
from penstock.tiers.usage import RECORD_NAME, locked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.tiers.files import Found
    from penstock.tiers.quota import Quota
    from penstock.tiers.usage import Books

    Progress = Callable[[int, int], None]  # done, in all

UNLINKS_PER_SAVE = 32
_LOOKS_PER_SAVE = 4 * UNLINKS_PER_SAVE
_TOUCHES_PER_SAVE = 64
# A listing is repeated after this time even if no name seems to have changed: files may grow.
_LIST_EVERY_S = 600.0
# So many files are removed before others get a chance at the lock.
_SLICE = 256


class Outcome(enum.Enum):
    """What became of a block that was to be saved."""

    SAVED = "saved"
    PRESENT = "present"  # it was there already
    NO_ROOM = "no room"  # the quota is full of what cannot go, or the block is larger than it
    CANCELLED = "cancelled"  # by the owner, or by a clear after it was offered
    FAILED = "failed"  # the disk


@dataclass(frozen=True, slots=True)
class Part:
    """A file being written, with its room on the disk."""

    name: str
    final_name: str
    size: int
    descriptor: int


@dataclass(frozen=True, slots=True)
class ModelUse:
    """What one model has in the directory; `latest` is the file that was used last."""

    files: int = 0
    bytes: int = 0
    used_ns: int = 0
    latest: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """The directory now; `other` are files that are not ours and are never removed."""

    held_bytes: int
    quota_bytes: int
    free_bytes: int
    other_files: int = 0
    other_bytes: int = 0
    models: dict[str, ModelUse] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verified:
    """What a verification found."""

    files: int
    bytes: int
    bad: dict[str, str]  # name, and what is wrong
    removed: int  # how many of these could be removed


class Store:
    """One directory under one quota; several processes may each have one of these over it."""

    def __init__(self, directory: Path, quota: Quota, files: Files | None = None) -> None:
        self.directory = directory
        self.quota = quota
        self.files = files or Files(directory)
        self.index = Index()
        self.evictions = 0
        self.evicted_bytes = 0
        # As of the last look; others change them meanwhile.
        self.held_bytes = 0
        self.quota_bytes = 0
        # The listing is repeated when others have changed names since, or it is old.
        self._mark: int | None = None
        self._stale = True
        self._listed_at = 0.0

    # --- a file's life ---

    def reserve(self, name: str, size: int, offered_ns: int) -> Part | Outcome:
        """Room for a file, older ones removed for it, and the file to write to."""
        self._mark_touched(_TOUCHES_PER_SAVE)
        with self._locked() as books:
            # A clock that was set back must not refuse everything until it is that late again.
            if offered_ns <= books.cleared_ns <= time.time_ns():
                return Outcome.CANCELLED
            quota = self._quota_now(books)
            self._make_room(books, quota - space(size), UNLINKS_PER_SAVE)
            if books.held_bytes + space(size) > quota:
                return Outcome.NO_ROOM
            part = part_name(name)
            return Part(part, name, size, books.create(part, size))

    def publish(self, part: Part) -> Outcome:
        """Give a written file its name, unless it is there; ends the part."""
        try:
            with self._locked() as books:
                if self._exists(part.final_name):
                    books.unlink(part.name, part.size)
                    outcome = Outcome.PRESENT
                else:
                    outcome = self._rename(part)
        except Exception:
            self.discard(part)
            raise
        self.files.close(part.descriptor)
        if outcome in (Outcome.SAVED, Outcome.PRESENT):
            self.index.add(tag_of(part.final_name), part.size)
        return outcome

    def discard(self, part: Part) -> None:
        """Give up a file being written; if it cannot be removed now, a recount will."""
        try:
            with contextlib.suppress(OSError), self._locked() as books:
                books.unlink(part.name, part.size)
        finally:
            self.files.close(part.descriptor)

    def remove(self, name: str) -> bool:
        """Remove a block file; if that fails it is at least not offered again for a while."""
        removed = False
        with contextlib.suppress(OSError), self._locked() as books:
            size = self.files.status(name).st_size
            removed = books.unlink(name, size)
        self.index.drop(tag_of(name))  # last, since taking the lock may list anew
        return removed

    # --- the whole directory ---

    def refresh(self) -> None:
        """Count and list anew if need be, mark what was used, and come down to the quota.

        A directory that cannot be written to is still listed, so that it serves hits, before the
        OSError is raised.
        """
        try:
            with self._locked() as books:
                old = time.monotonic() - self._listed_at > _LIST_EVERY_S
                if books.listing is None and (old or self._stale):
                    self._adopt(books.recount())
        except OSError:
            self.index.replace(self.files.list())
            raise
        self._mark_touched(len(self.index))
        while self._trim() == _SLICE:
            pass

    def clear(self, progress: Progress = lambda done, total: None) -> tuple[int, int]:
        """Remove all that is ours, also what is being written or waits to be; (files, bytes)."""
        with self._locked() as books:
            books.mark_cleared()
            doomed = [found for found in books.recount() if _is_ours(found)]
            # Those being written first: without its name a file cannot be published.
            doomed.sort(key=lambda found: not is_part(found.name))
            parts = sum(1 for found in doomed if is_part(found.name))
            removed = [f for f in doomed[: parts + _SLICE] if self._unlink(books, f)]
        progress(len(removed), len(doomed))
        for start in range(parts + _SLICE, len(doomed), _SLICE):
            with self._locked() as books:
                removed += [f for f in doomed[start : start + _SLICE] if self._unlink(books, f)]
            progress(len(removed), len(doomed))
        return len(removed), sum(found.size for found in removed)

    def verify(self, progress: Progress = lambda done, total: None) -> Verified:
        """Read every block file of every model; a bad one is removed."""
        blocks = [found for found in self._listing() if _is_block(found)]
        total, done, files, good = sum(found.size for found in blocks), 0, 0, 0
        bad: dict[str, str] = {}
        for found in blocks:
            try:
                self._check(found.name)
            except FileNotFoundError:
                pass  # removed meanwhile
            except BadBlock as problem:
                bad[found.name] = str(problem)
            else:
                files, good = files + 1, good + found.size
            done += found.size
            progress(done, total)
        removed = sum(self.remove(name) for name in bad)
        return Verified(files, good, bad, removed)

    def summary(self) -> Summary:
        """What is there, by a listing and one header a model; nothing is changed, nor made."""
        models: dict[str, ModelUse] = {}
        others, held = [], 0
        for found in self._listing():
            held += space(found.size)
            parsed = parse_block_name(found.name) if found.regular else None
            if parsed is None:
                if not is_part(found.name) and found.name != RECORD_NAME:
                    others.append(found.size)
                continue
            old = models.get(parsed[0], ModelUse())
            used_ns, latest = max((old.used_ns, old.latest), (found.modified_ns, found.name))
            models[parsed[0]] = ModelUse(old.files + 1, old.bytes + found.size, used_ns, latest)
        models = {m: replace(use, label=self._label(use.latest)) for m, use in models.items()}
        free_bytes = self.files.free_bytes()
        quota_bytes = self.quota.bytes(free_bytes, held)
        return Summary(held, quota_bytes, free_bytes, len(others), sum(others), models)

    # --- inside ---

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Books]:
        with locked(self.files) as books:
            if books.listing is not None:
                self._adopt(books.listing)
            elif books.mark != self._mark:
                self._stale = True
            yield books
        self._mark, self.held_bytes = books.mark, books.held_bytes

    def _adopt(self, listing: list[Found]) -> None:
        self.index.replace(listing)
        self._stale, self._listed_at = False, time.monotonic()

    def _quota_now(self, books: Books) -> int:
        self.quota_bytes = self.quota.bytes(self.files.free_bytes(), books.held_bytes)
        return self.quota_bytes

    def _make_room(self, books: Books, target_bytes: int, unlinks: int) -> int:
        """Remove the least recently used until no more than the target is held; how many went."""
        removed, problem = 0, None
        for _ in range(_LOOKS_PER_SAVE + unlinks):
            oldest = self.index.oldest()
            if books.held_bytes <= target_bytes or unlinks == 0 or oldest is None:
                break
            tag, used_ns = oldest
            try:
                status = self.files.status(name_of(tag))
                if status.st_mtime_ns > used_ns:
                    self.index.used_elsewhere(tag, status.st_mtime_ns)
                    continue
                unlinks -= 1
                books.unlink(name_of(tag), status.st_size)
            except FileNotFoundError:
                self.index.drop(tag)
                continue
            except OSError as error:
                problem = error
                self.index.postpone(tag)
                continue
            self.index.drop(tag)
            removed += 1
            self.evictions += 1
            self.evicted_bytes += status.st_size
        if problem is not None and not removed:
            raise problem
        return removed

    def _trim(self) -> int:
        with self._locked() as books:
            return self._make_room(books, self._quota_now(books), _SLICE)

    def _unlink(self, books: Books, found: Found) -> bool:
        if not is_part(found.name):
            self.index.drop(tag_of(found.name))
        return books.unlink(found.name, found.size)

    def _rename(self, part: Part) -> Outcome:
        try:
            self.files.rename(part.name, part.final_name)
        except FileNotFoundError:  # a clear has taken it away
            return Outcome.CANCELLED
        return Outcome.SAVED

    def _exists(self, name: str) -> bool:
        try:
            self.files.status(name)
        except FileNotFoundError:
            return False
        return True

    def _label(self, name: str) -> str:
        try:
            descriptor = self.files.open(name, READ)
            try:
                return read_header(self.files, descriptor).label
            finally:
                self.files.close(descriptor)
        except (OSError, BadBlock):
            return ""

    def _check(self, name: str) -> None:
        descriptor = self.files.open(name, READ)
        try:
            check_file(self.files, descriptor, name)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise BadBlock("the disk cannot read it") from error
        finally:
            self.files.close(descriptor)

    def _listing(self) -> list[Found]:
        try:
            return self.files.list()
        except FileNotFoundError:
            return []

    def _mark_touched(self, most: int) -> None:
        for tag, used_ns in self.index.take_touched(most):
            with contextlib.suppress(OSError):
                self.files.touch(name_of(tag), used_ns)


def _is_block(found: Found) -> bool:
    return found.regular and parse_block_name(found.name) is not None


def _is_ours(found: Found) -> bool:
    return _is_block(found) or is_part(found.name)
