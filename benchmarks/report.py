"""Shared by the benchmarks: the model under test, medians, and how a run is recorded.

Figures are printed as one JSON line. With `PENSTOCK_BENCH_MACHINE` set to a name of
`results/machines.json` they are also added to the claim in `results/`. What another program has
printed is added by hand:

    PENSTOCK_BENCH_MACHINE=cpu-2 python -m benchmarks.report CLAIM '{"figure": 1}'
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import claims

STARTER = "SmolLM2-135M-Instruct"


def starter_folder() -> Path:
    """Where the starter model lies."""
    home = Path(os.environ.get("PENSTOCK_HOME", Path.home() / ".penstock"))
    folder = home / "models" / STARTER
    if not folder.exists():
        sys.exit(f"{folder} is missing: run `make model` first.")
    return folder


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: list[float]) -> float:
    """The middle value."""
    return statistics.median(values)


def record(claim: str, figures: dict[str, Any]) -> None:
    """Print the figures of a claim, and add them to its history if this machine has a name."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    print(json.dumps({"claim": claim, "commit": commit, **figures}), flush=True)
    if machine := os.environ.get("PENSTOCK_BENCH_MACHINE"):
        today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        claims.append(claim, claims.Run(commit, machine, figures, date=today))


if __name__ == "__main__":
    record(sys.argv[1], json.loads(sys.argv[2]))
