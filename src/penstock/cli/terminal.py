"""What commands print: tables for a person, JSON for a program."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


def print_json(content: object) -> None:
    """One JSON document."""
    sys.stdout.write(json.dumps(content, indent=2, default=str) + "\n")


def print_line(text: str = "") -> None:
    """One line, as it is."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A plain table; what is None stays empty."""
    # Into a pipe a table is as wide as it needs to be.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 500)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row))
    console.print(table)


def size(count: int | None) -> str | None:
    """Bytes for a person."""
    if count is None:
        return None
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit in ("B", "KiB") else f"{amount:.1f} {unit}"


def number(count: int) -> str:
    """A count of parameters for a person."""
    for unit, factor in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f}{unit}"
    return str(count)


class Phases:
    """One bar for each phase of long work, on the terminal's error side."""

    def __init__(self, bars: Progress) -> None:
        self.latest: str | None = None
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        """How far it has come; a total of 0 is not known."""
        if self.latest != phase:
            self.finish()
            self.latest = phase
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, sized=False)
        total = total_bytes or None
        self._bars.update(self._tasks[phase], completed=done_bytes, total=total, sized=bool(total))

    def finish(self) -> None:
        """The latest phase is over."""
        if self.latest is not None:
            task = self._tasks[self.latest]
            total = next(t.total for t in self._bars.tasks if t.id == task) or 1
            self._bars.update(task, total=total, completed=total)


class _Bytes(DownloadColumn):
    """Bytes done and in all, of a phase that is counted in bytes."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.fields["sized"] else Text()


@contextmanager
def phases() -> Iterator[Phases]:
    """Bars while the block runs; none where nobody looks."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        _Bytes(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bars:
        shown = Phases(bars)
        yield shown
        shown.finish()
