"""`penstock cache stats|verify|clear`: the KV kept on disk, whether a server runs or not."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TransferSpeedColumn,
)

from penstock import config
from penstock.cli.terminal import print_json, print_line, print_table, size
from penstock.errors import PenstockError
from penstock.server.admin.cache import summary_view, when
from penstock.tiers import Quota, Store

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator


class CacheUnusable(PenstockError):  # noqa: N818 - named for what is the case
    """The cache directory cannot be read or changed."""


def stats(options: argparse.Namespace) -> int:
    """What is there, by model."""
    with _store(options) as store:
        found = store.summary()
    by_use = sorted(found.models.items(), key=lambda item: -item[1].used_ns)
    if options.json:
        print_json(summary_view(store, found))
        return 0
    print_line(
        f"{store.directory} holds {size(found.held_bytes)} of at most {size(found.quota_bytes)}; "
        f"{size(found.free_bytes)} of the disk are free."
    )
    if found.other_files:
        print_line(
            f"{found.other_files} files of {size(found.other_bytes)} there are not penstock's; "
            "they count, and are never removed."
        )
    if by_use:
        print_line()
        print_table(
            ("model", "files begin with", "files", "bytes", "last used"),
            [
                (use.label, model, use.files, size(use.bytes), when(use.used_ns))
                for model, use in by_use
            ],
        )
    return 0


def verify(options: argparse.Namespace) -> int:
    """Read everything; the exit code is 1 if something was damaged."""
    with _store(options) as store, _bar("verify", DownloadColumn(), TransferSpeedColumn()) as bar:
        started = time.monotonic()
        found = store.verify(bar)
        seconds = time.monotonic() - started
    if options.json:
        print_json(
            {
                "files": found.files,
                "bytes": found.bytes,
                "bad": found.bad,
                "removed": found.removed,
                "seconds": seconds,
            }
        )
    else:
        for name, problem in found.bad.items():
            print_line(f"{name} is damaged: {problem}.")
        ending = f"; {len(found.bad)} damaged, {found.removed} of them removed" if found.bad else ""
        print_line(f"{found.files} files of {size(found.bytes)} are whole{ending}.")
    return 1 if found.bad else 0


def clear(options: argparse.Namespace) -> int:
    """Remove everything that is ours, also what is being written."""
    with _store(options) as store, _bar("clear", MofNCompleteColumn()) as bar:
        files, removed_bytes = store.clear(bar)
    if options.json:
        print_json({"files": files, "bytes": removed_bytes})
    else:
        print_line(f"Removed {files} files of {size(removed_bytes)} from {store.directory}.")
    return 0


@contextmanager
def _store(options: argparse.Namespace) -> Iterator[Store]:
    settings = config.load(options.config).cache
    try:
        yield Store(settings.dir, Quota.parse(settings.size))
    except OSError as error:
        raise CacheUnusable(
            f"The cache directory {settings.dir} cannot be used: {error.strerror or error}. "
            "It is set by cache.dir."
        ) from None


@contextmanager
def _bar(what: str, *columns: Any) -> Iterator[Callable[[int, int], None]]:
    """A bar on the terminal, to report (done, in all) to."""
    shown = (TextColumn("{task.description}"), BarColumn(), *columns)
    with Progress(*shown, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
