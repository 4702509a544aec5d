"""More models than there is memory for, asked in random order: who was unloaded, and what it left.

Every model is the same folder under another name, so that one profile serves for all.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.testing.served import Served

_LOOK_EVERY = 50  # requests: the server forgets old events


@dataclass(slots=True)
class Rotation:
    """What a run showed."""

    limit_bytes: int
    needed_bytes: int = 0  # weights and least KV of all of them
    settled_s: list[float] = field(default_factory=list)  # each unload, from its decision on
    refused: list[str] = field(default_factory=list)
    first_bytes: int = 0  # of server and fork server, when each model had been there once
    last_bytes: int = 0

    def __str__(self) -> str:
        return (
            f"{self.needed_bytes / self.limit_bytes:.2f} x the limit; {len(self.refused)} refused; "
            f"{len(self.settled_s)} unloads, {max(self.settled_s, default=0)} s at most; server "
            f"and fork server {self.first_bytes} to {self.last_bytes} bytes"
        )


def add_names(source: Path, models: Path, names: Sequence[str]) -> None:
    """The model in `source` under further names."""
    for name in names:
        folder = models / name
        folder.mkdir(parents=True)
        for file in source.iterdir():
            if file.is_file():
                os.link(file, folder / file.name)


def rotate(server: Served, limit_bytes: int, names: Sequence[str], count: int) -> Rotation:
    """Ask each once, then `count` times one of them."""
    run = Rotation(limit_bytes)
    for name in names:
        _ask(server, name, run)
        assert not run.refused, run.refused
        row = server.row(name)
        run.needed_bytes += row["weight_bytes"] + row["kv_min_bytes"]
    run.first_bytes = _own_bytes(server)
    order, seen = random.Random(5), 0.0
    for number in range(count):
        _ask(server, order.choice(names), run)
        if number % _LOOK_EVERY == _LOOK_EVERY - 1 or number == count - 1:
            new = [row for row in _unloads(server) if row["at"] > seen]
            run.settled_s += [row["settled_s"] for row in new]
            seen = new[-1]["at"] if new else seen
    run.last_bytes = _own_bytes(server)
    return run


def check(run: Rotation) -> None:
    """Every claim."""
    assert run.needed_bytes >= 2 * run.limit_bytes, f"less than it should be: {run}"
    assert not run.refused, run.refused[:5]
    assert run.settled_s, "nobody was unloaded"
    assert max(run.settled_s) < 1.0, str(run)
    assert abs(run.last_bytes - run.first_bytes) <= 0.01 * run.first_bytes, str(run)


def _ask(server: Served, model: str, run: Rotation) -> None:
    body = {"model": model, "prompt": "The sea is", "max_tokens": 4}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
    if answer.status_code != 200:
        run.refused.append(answer.text)


def _own_bytes(server: Served) -> int:
    """What the server and the fork server hold; workers come and go."""
    memory = server.get("/admin/api/memory")
    return sum(memory["processes"][owner]["anonymous_bytes"] for owner in ("server", "fork server"))


def _unloads(server: Served) -> list[dict[str, Any]]:
    return [row for row in server.get("/admin/api/events") if row["event"] == "unload"]
