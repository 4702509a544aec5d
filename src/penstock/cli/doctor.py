"""`penstock doctor`: what is wrong with this machine, every setting, every number of the guard."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock import config
from penstock.catalog import Catalog, huggingface_cache
from penstock.cli import flags_of
from penstock.cli.doctor_checks import PROBLEM, findings
from penstock.cli.terminal import print_json, print_line, print_table, size
from penstock.config.knobs import knobs
from penstock.config.model_settings import ModelSettings
from penstock.config.settings import SECTIONS
from penstock.memory.guard import guard_numbers
from penstock.memory.readings.gauge import read_gpus, read_ram

if TYPE_CHECKING:
    import argparse


def doctor(options: argparse.Namespace) -> int:
    """Print the settings, the guard and the findings; the exit code is 1 if there is a problem."""
    settings = config.load(options.config, flags=flags_of(options))
    ram, gpus = read_ram(), read_gpus()
    guard = guard_numbers(settings, ram, gpus)
    problems = _problems(settings)
    found = list(findings(settings, ram, gpus, quick=options.quick))
    code = 1 if any(finding.level == PROBLEM for finding in found) else 0
    if options.json:
        values = [
            {"key": key, "value": value, "origin": origin}
            for key, value, origin in settings.values()
        ]
        numbers = [
            {
                "domain": str(row.domain),
                "name": row.name,
                "bytes": row.bytes,
                "origin": row.origin,
            }
            for row in guard
        ]
        print_json(
            {
                "settings": values,
                "memory": numbers,
                "ignored_variables": settings.ignored_variables,
                "problems": problems,
                "findings": [finding.row() for finding in found],
            }
        )
        return code
    rows = [(key, _shown(key, value), origin) for key, value, origin in settings.values()]
    print_table(("setting", "value", "from"), rows)
    print_line()
    print_table(
        ("memory", "what", "size", "bytes", "from"),
        [(str(row.domain), row.name, size(row.bytes), row.bytes, row.origin) for row in guard],
    )
    for problem in problems:
        print_line(problem)
    for variable in settings.ignored_variables:
        print_line(f"The variable {variable} is ignored: it names no section of the settings.")
    print_line()
    print_table(("check", "", "found"), [(one.what, one.level, one.said) for one in found])
    for finding in found:
        if finding.remedy:
            print_line(f"{finding.what}: {finding.remedy}")
    return code


def _problems(settings: config.Config) -> list[str]:
    """Folders that cannot be served, and settings of models that do not go with those on disk."""
    catalog = Catalog(settings.model_dirs, settings.models.hf_cache or huggingface_cache())
    models = catalog.scan()
    hidden = catalog.problems | settings.models.hidden(models)
    return [
        f"The model {name!r} cannot be used: {problem.rstrip('.')}."
        for name, problem in hidden.items()
    ] + [
        f"There is no model {name!r}, which [models.{name!r}] is for."
        for name in settings.models.named
        if name not in models
    ]


def _shown(key: str, value: object) -> str:
    """A value as it may be written; sizes in the unit that people read."""
    if value is None or value == () or value == {}:
        return "none"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return json.dumps(value, default=str)
    if isinstance(value, bool):
        return str(value).lower()
    section, _, name = key.rpartition(".")
    knob = knobs(SECTIONS.get(section, ModelSettings)).get(name)
    if knob is not None and knob.unit == "bytes" and str(value).isdecimal():
        return str(size(int(str(value))))
    return f"{value:g}" if isinstance(value, float) else str(value)
