"""Shared by the benchmarks: the model under test, medians, and the line that is recorded."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def record(name: str, figures: dict[str, Any]) -> None:
    """Print the figures as one JSON line that can be pasted into benchmarks/RESULTS.md."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps({"benchmark": name, "commit": commit, "machine": machine, **figures}))
