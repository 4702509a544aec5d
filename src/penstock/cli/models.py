"""`penstock pull`, `list` and `ps`: models from elsewhere, on disk and in memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from penstock import config, sources
from penstock.catalog import Catalog, huggingface_cache
from penstock.cli import flags_of
from penstock.cli.remote import connect, require_success
from penstock.cli.terminal import number, print_json, print_line, print_table, size

if TYPE_CHECKING:
    import argparse

    from penstock.catalog import Card


def pull(options: argparse.Namespace) -> int:
    """Fetch a model; the bar goes to the terminal, the outcome to the output."""
    settings = config.load(options.config)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bars:
        shown = _Phases(bars)
        card = sources.pull(options.spec, settings.home, shown)
    if options.json:
        print_json(card_row(card))
    else:
        verb = "is already at" if shown.latest == "present" else "is now at"
        print_line(f"{card.name} {verb} {card.path} ({size(card.weight_bytes)}).")
    return 0


class _Phases:
    """One bar per phase of a pull."""

    def __init__(self, bars: Progress) -> None:
        self.latest: str | None = None
        self._bars = bars
        self._tasks: dict[str, Any] = {}

    def __call__(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        """What `sources.pull` reports to."""
        self.latest = phase
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase)
        self._bars.update(self._tasks[phase], completed=done_bytes, total=total_bytes or None)


def list_models(options: argparse.Namespace) -> int:
    """Every model on disk."""
    settings = config.load(options.config, flags=flags_of(options))
    catalog = Catalog(settings.model_dirs, settings.models.hf_cache or huggingface_cache())
    rows = [card_row(card) for card in catalog.scan().values()]
    if options.json:
        print_json(rows)
        return 0
    if not rows:
        print_line("There is no model yet; `penstock pull smollm2` fetches a first one.")
    else:
        print_table(
            ("name", "kind", "architecture", "parameters", "bytes", "context", "from"),
            [
                (
                    row["name"],
                    row["kind"],
                    row["architecture"],
                    number(row["parameters"]),
                    size(row["bytes"]),
                    row["context"],
                    row["source"],
                )
                for row in rows
            ],
        )
    for name, problem in catalog.problems.items():
        sys.stderr.write(f"{name} cannot be used: {problem}\n")
    return 0


def card_row(card: Card) -> dict[str, Any]:
    """A model as `list --json` shows it."""
    return {
        "name": card.name,
        "path": str(card.path),
        "kind": card.kind,
        "architecture": card.architecture,
        "parameters": card.parameters,
        "bytes": card.bytes_in_memory(),
        "context": card.context,
        "dtype": card.dtype,
        "stored_bytes": card.weight_bytes,
        "source": card.source,
    }


def ps(options: argparse.Namespace) -> int:
    """The models of a running server."""
    with connect(options) as client:
        response = client.get("/admin/api/models")
        require_success(response)
        rows: list[dict[str, Any]] = response.json()
    if options.json:
        print_json(rows)
    elif not rows:
        print_line("No model is loaded.")
    else:
        print_table(
            ("name", "state", "pid", "bytes", "context", "leases", "idle"),
            [
                (
                    row["name"],
                    _state(row),
                    row["pid"],
                    size(row["bytes"]),
                    row["context"],
                    row["leases"],
                    f"{row['idle_s']:.0f} s",
                )
                for row in rows
            ],
        )
    return 0


def _state(row: dict[str, Any]) -> str:
    """The state, with how far a load has come or why it failed."""
    state = str(row["state"])
    if progress := row.get("progress"):
        done, total = progress["done_bytes"], progress["total_bytes"]
        return f"{state} {progress['phase']}" + (f" {100 * done // total}%" if total else "")
    if reason := row.get("reason"):
        return f"{state}: {reason}"
    return state
