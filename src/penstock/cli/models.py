"""`penstock pull` and `list`: models from elsewhere and on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import penstock
from penstock import config, sources
from penstock.catalog import Catalog, huggingface_cache
from penstock.cli import flags_of
from penstock.cli.terminal import number, phases, print_json, print_line, print_table, size
from penstock.server.admin.views import card_row
from penstock.server.processes.fork_server_client import WORKER_ENVIRONMENT

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


_COLUMNS = (
    "name", "kind", "architecture", "parameters", "stored", "in memory", "format", "kv",
    "context", "alias", "from",
)  # fmt: skip


def pull(options: argparse.Namespace) -> int:
    """Fetch a model; the bar goes to the terminal, the outcome to the output."""
    settings = config.load(options.config)
    with _compiled_beside(), phases() as shown:
        card = sources.pull(options.spec, settings.home, shown, convert=options.convert)
    if options.json:
        print_json(card_row(card, settings.models))
    else:
        verb = "is already at" if shown.latest == "present" else "is now at"
        formats = f", {', '.join(card.formats)}" if card.formats else ""
        print_line(f"{card.name} {verb} {card.path} ({size(card.weight_bytes)}{formats}).")
    return 0


@contextmanager
def _compiled_beside() -> Iterator[None]:
    """The CPU's kernels, compiled while a model comes: else the first start does it.

    What comes of it is Numba's cache, and whoever finds no kernel there compiles it.
    """
    if _are_compiled():
        yield
        return
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "penstock.worker.backends.preload"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **WORKER_ENVIRONMENT},
    ) as compiler:
        try:
            yield
        except BaseException:
            compiler.kill()
            raise
        if compiler.poll() is None and sys.stderr.isatty():
            sys.stderr.write("Compiling kernels for this processor, once.\n")


def _are_compiled() -> bool:
    """Whether the one that is compiled last is in the usual place, and newer than its source."""
    if find_spec("numba") is None:
        return True
    folder = Path(penstock.__file__).parent / "worker/backends/cpu/kernels/one_call"
    index = sorted((folder / "__pycache__").glob("layer_loops.*.nbi"))
    source = folder / "layer_loops.py"
    return bool(index) and index[-1].stat().st_mtime > source.stat().st_mtime


def list_models(options: argparse.Namespace) -> int:
    """Every model on disk."""
    settings = config.load(options.config, flags=flags_of(options))
    catalog = Catalog(settings.model_dirs, settings.models.hf_cache or huggingface_cache())
    cards = catalog.scan()
    rows = [card_row(card, settings.models) for card in cards.values()]
    if options.json:
        print_json(rows)
        return 0
    if not rows:
        print_line("There is no model yet; `penstock pull smollm2` fetches a first one.")
    else:
        print_table(
            _COLUMNS,
            [
                (
                    row["name"],
                    row["kind"],
                    row["architecture"],
                    number(row["parameters"]),
                    size(row["stored_bytes"]),
                    size(row["bytes"]),
                    ", ".join(row["formats"]) or row["dtype"],
                    row["kv_dtype"],
                    row["context"],
                    ", ".join(row["aliases"]),
                    row["source"],
                )
                for row in rows
            ],
        )
    for name, problem in (catalog.problems | settings.models.hidden(cards)).items():
        sys.stderr.write(f"{name} cannot be used: {problem}\n")
    return 0
