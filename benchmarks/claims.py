"""What we claim and every run that measured it: the files `benchmarks/results/*.json`.

A file is a list of claims; a claim has its runs, oldest first. `tables` renders the latest run of
each. Knows nothing of what is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

RESULTS = Path(__file__).parent / "results"
MACHINES = "machines"  # the file that says what the names of machines stand for


class Run(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One measurement. A result that is itself an object of figures is a row of a table."""

    commit: str
    machine: str
    result: dict[str, Any]
    date: str = ""  # the day, if it was recorded
    note: str = ""  # what a reader must know to read the figures


class Claim(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One thing that we say of the software, and how to measure it again."""

    id: str
    claim: str
    command: str
    runs: list[Run]  # oldest first; none before the first is recorded
    target: str = ""

    @property
    def latest(self) -> Run:
        """The run that the pages show."""
        return self.runs[-1]


def read(topic: str, folder: Path = RESULTS) -> list[Claim]:
    """The claims of one file."""
    return msgspec.json.decode((folder / f"{topic}.json").read_bytes(), type=list[Claim])


def write(topic: str, claims: list[Claim], folder: Path = RESULTS) -> None:
    """Replace one file."""
    text = msgspec.json.format(msgspec.json.encode(claims), indent=1)
    (folder / f"{topic}.json").write_bytes(text + b"\n")


def machines() -> dict[str, str]:
    """What each name of a machine stands for."""
    found = (RESULTS / f"{MACHINES}.json").read_bytes()
    return msgspec.json.decode(found, type=dict[str, str])


def topics(folder: Path = RESULTS) -> list[str]:
    """Every file with claims."""
    return sorted(path.stem for path in folder.glob("*.json") if path.stem != MACHINES)


def append(claim_id: str, run: Run, folder: Path = RESULTS) -> None:
    """Add a run to the claim of that id."""
    for topic in topics(folder):
        claims = read(topic, folder)
        for claim in claims:
            if claim.id == claim_id:
                claim.runs.append(run)
                write(topic, claims, folder)
                return
    raise KeyError(f"no file in {folder} has the claim {claim_id!r}; add it with its command first")
