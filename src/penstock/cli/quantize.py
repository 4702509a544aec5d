"""`penstock quantize`: a model on disk in fewer bits, made here or by a running server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from penstock import config
from penstock.catalog import Catalog, huggingface_cache
from penstock.cli import flags_of
from penstock.cli.remote import RemoteError, connect, require_success
from penstock.cli.terminal import Phases, phases, print_json, print_line, size
from penstock.memory.domains import RAM
from penstock.memory.governor import Readings, outside
from penstock.memory.guard import open_books
from penstock.memory.ledger import Purpose
from penstock.memory.limits import QUANTIZE_BYTES
from penstock.memory.readings.gauge import read_ram
from penstock.server.admin.views import card_row
from penstock.sources.quantize import default_name
from penstock.sources.quantize import quantize as make

if TYPE_CHECKING:
    import argparse

    import httpx

    from penstock.config import MemorySettings
    from penstock.memory.ledger import Reservation

_TASKS = "/admin/api/tasks"
_LOOK_S = 0.3


def quantize(options: argparse.Namespace) -> int:
    """Make the model; the bar goes to the terminal, the outcome to the output."""
    with phases() as shown:
        row = _ask(options, shown) if options.url else _make(options, shown)
    if options.json:
        print_json(row)
    else:
        verb = "is already at" if shown.latest == "present" else "is now at"
        print_line(
            f"{row['name']} {verb} {row['path']} ({size(row['stored_bytes'])} stored, "
            f"{size(row['bytes'])} in memory, {', '.join(row['formats'])})."
        )
    return 0


def _make(options: argparse.Namespace, shown: Phases) -> dict[str, Any]:
    settings = config.load(options.config, flags=flags_of(options))
    catalog = Catalog(settings.model_dirs, settings.models.hf_cache or huggingface_cache())
    card = catalog.find(settings.models.canonical(options.model))
    name = options.name or default_name(card, options.to)
    with _booked(settings.memory):
        made = make(card, options.to, name, settings.home, shown)
    return card_row(made, settings.models)


def _booked(settings: MemorySettings) -> Reservation:
    """The memory that it takes, under the limits that a server would have; `OutOfBudget` if that
    is not there."""
    ram = read_ram()
    books = open_books(settings, ram, ())
    for domain, (external, capacity) in outside(Readings(ram, (), {})).items():
        books.observe(domain, external, capacity)
    return books.reserve("quantize", {(RAM, Purpose.PROCESS): QUANTIZE_BYTES})


def _ask(options: argparse.Namespace, shown: Phases) -> dict[str, Any]:
    fields = {"kind": "quantize", "model": options.model, "to": options.to, "name": options.name}
    with connect(options) as client:
        began = client.post(_TASKS, json={key: value for key, value in fields.items() if value})
        require_success(began)
        path = f"{_TASKS}/{began.json()['id']}"
        try:
            row = _follow(client, path, shown)
        except KeyboardInterrupt:
            client.post(f"{path}/cancel")
            _follow(client, path, shown)
            raise
    if row["state"] != "done":
        raise RemoteError(row["error"]["message"])
    result: dict[str, Any] = row["result"]
    return result


def _follow(client: httpx.Client, path: str, shown: Phases) -> dict[str, Any]:
    """A task's row once it has ended."""
    while True:
        answer = client.get(path)
        require_success(answer)
        row: dict[str, Any] = answer.json()
        if row["phase"]:
            shown(row["phase"], row["done"], row["total"])
        if row["state"] != "running":
            return row
        time.sleep(_LOOK_S)
