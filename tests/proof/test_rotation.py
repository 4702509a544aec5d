"""Four models, twice as large as the limit, asked in random order: all answered, none refused.

Every unload settles within a second of its decision, and what the server's processes hold after the
last is what they held after the first round, within 1 %.
"""

from __future__ import annotations

import os
import random
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.served import Served, served

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.proof

REQUESTS = int(os.environ.get("PENSTOCK_PROOF_REQUESTS", "200"))
LIMIT_MIB = 2200
TINY = "random:tiny-llama"


def ask(server: Served, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "The sea is", "max_tokens": 4}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)


def own_bytes(server: Served) -> int:
    """What the server and the template hold; workers come and go."""
    memory = server.get("/admin/api/memory")
    return sum(memory["processes"][owner]["anonymous_bytes"] for owner in ("server", "template"))


def events(server: Served, kind: str) -> list[dict[str, Any]]:
    return [row for row in server.get("/admin/api/events") if row["event"] == kind]


def test_two_hundred_requests_over_twice_the_limit(starter_folder: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    names = []
    for number in range(3):
        folder = models / f"starter-{number}"
        folder.mkdir(parents=True)
        for file in starter_folder.iterdir():
            os.link(file, folder / file.name)
        names.append(folder.name)
    names.append(TINY)
    order = random.Random(5)
    with served(
        tmp_path,
        tmp_path / "serve.log",
        f"--memory={LIMIT_MIB}MiB",
        "--device=cpu",
        environment={"PENSTOCK_MODELS_KV_TOKENS": "2048"},
    ) as server:
        for name in names:
            assert ask(server, name).status_code == 200
        first = own_bytes(server)
        for _ in range(REQUESTS):
            answer = ask(server, order.choice(names))
            assert answer.status_code == 200, answer.text
        last = own_bytes(server)
        unloads = events(server, "unload")
        settled = [row["settled_s"] for row in unloads]
        sys.stdout.write(f"{len(unloads)} unloads, {max(settled)} s at most; {first} to {last}\n")
        assert unloads
        assert max(settled) < 1.0
        assert abs(last - first) <= 0.01 * first
