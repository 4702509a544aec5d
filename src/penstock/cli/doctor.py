"""`penstock doctor`: every setting and every number of the memory guard, and their origins."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock import config
from penstock.catalog import Catalog, huggingface_cache
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
    problems = _problems(settings)
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
                "problems": problems,
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
    for problem in problems:
        print_line(problem)
    for variable in settings.ignored_variables:
        print_line(f"The variable {variable} is ignored: it names no section of the settings.")
    return 0


def _problems(settings: config.Config) -> list[str]:
    """Settings of models that do not go with the models on disk."""
    models = Catalog(settings.model_dirs, settings.models.hf_cache or huggingface_cache()).scan()
    hidden = settings.models.hidden(models).items()
    return [f"The model {name!r} cannot be used: {problem}." for name, problem in hidden] + [
        f"There is no model {name!r}, which [models.{name!r}] is for."
        for name in settings.models.named
        if name not in models
    ]


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return json.dumps(value, default=str) if value else ""
    return "" if value is None else str(value)
