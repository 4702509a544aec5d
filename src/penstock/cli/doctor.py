"""`penstock doctor`: every setting and every number of the memory guard, and their origins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import config
from penstock.cli import flags_of
from penstock.cli.terminal import print_json, print_line, print_table, size
from penstock.memory.gauge import read_gpus, read_ram
from penstock.memory.guard import guard_numbers

if TYPE_CHECKING:
    import argparse


def doctor(options: argparse.Namespace) -> int:
    """Print the settings and the guard."""
    settings = config.load(options.config, flags=flags_of(options))
    guard = guard_numbers(settings, read_ram(), read_gpus())
    if options.json:
        values = [
            {"key": key, "value": value, "origin": origin}
            for key, value, origin in settings.values()
        ]
        numbers = [
            {"domain": row.domain, "name": row.name, "bytes": row.bytes, "origin": row.origin}
            for row in guard
        ]
        print_json(
            {
                "settings": values,
                "memory": numbers,
                "ignored_variables": settings.ignored_variables,
            }
        )
        return 0
    rows = [(key, _shown(value), origin) for key, value, origin in settings.values()]
    print_table(("setting", "value", "from"), rows)
    print_line()
    print_table(
        ("memory", "what", "size", "bytes", "from"),
        [(row.domain, row.name, size(row.bytes), row.bytes, row.origin) for row in guard],
    )
    for variable in settings.ignored_variables:
        print_line(f"The variable {variable} is ignored: it names no section of the settings.")
    return 0


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
