"""`penstock doctor`: every setting in force and where it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import config
from penstock.cli.terminal import print_json, print_line, print_table

if TYPE_CHECKING:
    import argparse


def doctor(options: argparse.Namespace) -> int:
    """Print the settings."""
    settings = config.load(options.config)
    if options.json:
        values = [
            {"key": key, "value": value, "origin": origin}
            for key, value, origin in settings.values()
        ]
        print_json({"settings": values, "ignored_variables": settings.ignored_variables})
        return 0
    rows = [(key, _shown(value), origin) for key, value, origin in settings.values()]
    print_table(("setting", "value", "from"), rows)
    for variable in settings.ignored_variables:
        print_line(f"The variable {variable} is ignored: it names no section of the settings.")
    return 0


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
