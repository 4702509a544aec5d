"""From `penstock serve` to the first answer, on a machine that has never seen the model.

    python -m benchmarks.first_start [--rounds 5] [--compile]

Each round has a home of its own with nothing but the model in it: no profile is stored. Kernels are
in Numba's cache, as `penstock pull` leaves them; with `--compile` each round has an empty cache as
well. The answer is a chat of 16 tokens, asked as soon as the server listens.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import median, record, starter_folder
from penstock.testing.served import Served, served

ASKED = {"messages": [{"role": "user", "content": "What is a penstock?"}], "max_tokens": 16}


def main() -> None:
    """Start it over and over; compare the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    folder = options.folder or starter_folder()
    rounds = [first_start(folder, compiles=options.compile) for _ in range(options.rounds)]
    answers = [found["answer_s"] for found in rounds]
    record(
        "first_start_compiling" if options.compile else "first_start",
        {
            "answer s": round(median(answers), 2),
            "least s": min(answers),
            "most s": max(answers),
            "listening s": round(median([found["listens_s"] for found in rounds]), 2),
            "load s": round(median([found["load_s"] for found in rounds]), 2),
            "processor s": round(median([found["processor_s"] for found in rounds]), 1),
            "phases": {
                name: round(median([found["phases"].get(name, 0.0) for found in rounds]), 2)
                for name in rounds[-1]["phases"]
            },
        },
    )


def first_start(folder: Path, *, compiles: bool) -> dict[str, Any]:
    """One start, in seconds since the command."""
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        (home / "models").mkdir()
        (home / "models" / folder.name).symlink_to(folder.resolve())
        environment = {"NUMBA_CACHE_DIR": str(home / "numba")} if compiles else {}
        began, used = time.perf_counter(), _processor_s()
        flags = f"--model={folder.name}", "--memory=4GiB"
        with served(home, home / "log", *flags, environment=environment) as server:
            listens_s = time.perf_counter() - began
            answer = httpx.post(
                f"{server.url}/v1/chat/completions",
                json={"model": folder.name, **ASKED},
                timeout=600,
            )
            answer.raise_for_status()
            answer_s = time.perf_counter() - began
            load = _load(server)
        return {
            "listens_s": listens_s,
            "answer_s": round(answer_s, 2),
            "load_s": load["load_s"],
            "phases": load["phases"],
            "processor_s": _processor_s() - used,
        }


def _load(server: Served) -> dict[str, Any]:
    found: list[dict[str, Any]] = server.get("/admin/api/events")
    return next(row for row in found if row["event"] == "loaded")


def _processor_s() -> float:
    """Of children that have ended, theirs included."""
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    main()
