"""Renders the latest run of every claim into the pages that show it.

    python -m benchmarks.tables            rewrite the pages
    python -m benchmarks.tables --check    exit with 1 if a page is not what the results say

What is between `<!-- results: TOPIC -->` and `<!-- end of results -->` in a page is replaced by the
tables of `results/TOPIC.json`. The rest of a page is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import claims

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.claims import Claim

ROOT = Path(__file__).parents[1]
PAGES = tuple(ROOT / page for page in ("docs/proof.md", "benchmarks/cpu.md", "benchmarks/gpu.md"))
_IN_A_LINE = 4  # figures; more of them are a line each
_BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def rendered(page: str) -> str:
    """The page with its blocks as the results are now."""
    return _BLOCK.sub(lambda block: f"{block[1]}{_tables(block[2])}{block[3]}", page)


def shown_topics(page: str) -> list[str]:
    """The files that a page shows."""
    return [block[2] for block in _BLOCK.finditer(page)]


def _tables(topic: str) -> str:
    if topic == claims.MACHINES:
        return _table(("machine", "what it is"), claims.machines().items())
    found = [claim for claim in claims.read(topic) if claim.runs]  # what was measured
    if not found:
        return ""
    with_target = any(claim.target for claim in found)
    head = ("claim", *(("target",) if with_target else ()), "result", "commit", "machine")
    rows = [
        (
            f"{claim.claim}<br>`{claim.command}`",
            *((claim.target,) if with_target else ()),
            _summary(claim),
            claim.latest.commit,
            claim.latest.machine,
        )
        for claim in found
    ]
    return _table(head, rows) + "".join(_details(claim) for claim in found)


def _summary(claim: Claim) -> str:
    """The figures that are not rows of a table of their own."""
    plain = {name: v for name, v in claim.latest.result.items() if not isinstance(v, dict)}
    words = [f"{_name(name)}: {_value(value)}" for name, value in plain.items()]
    if len(plain) < len(claim.latest.result):
        words.append("see below")
    return ("<br>" if len(words) > _IN_A_LINE else "; ").join(words)


def _details(claim: Claim) -> str:
    """The claim's own table, and its note."""
    run = claim.latest
    rows = {name: value for name, value in run.result.items() if isinstance(value, dict)}
    if not rows and not run.note:
        return ""
    note = f" {run.note}" if run.note else ""
    heading = f"\n**{claim.claim}** ({run.commit}).{note}\n"
    if not rows:
        return heading
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    body = [
        (_name(name), *(_value(row.get(column, "")) for column in columns))
        for name, row in rows.items()
    ]
    return f"{heading}\n{_table(('', *map(_name, columns)), body)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '¦') for cell in row)} |\n" for row in lines)


def _name(name: str) -> str:
    return name.replace("_", " ")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    if isinstance(value, dict):
        return ", ".join(f"{_name(name)} {_value(each)}" for name, each in value.items())
    return str(value)


def main() -> None:
    """Write the pages, or say which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for page in PAGES:
        before = page.read_text("utf-8")
        after = rendered(before)
        if after == before:
            continue
        if check:
            sys.exit(f"{page} is not what the results say: run `python -m benchmarks.tables`.")
        page.write_text(after, "utf-8")


if __name__ == "__main__":
    main()
