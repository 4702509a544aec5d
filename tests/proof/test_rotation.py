"""Models twice as large as the limit, asked in random order: all answered, none refused.

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
LIMIT = 2150 << 20
KV_LEAST_TOKENS = 8192
CONFIG = f"""
[models]
kv_least_tokens = {KV_LEAST_TOKENS}
device = "cpu"

[models.starter-5]
dtype = "bfloat16"
"""
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
    names = [f"starter-{number}" for number in range(6)]
    for name in names:
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        for file in starter_folder.iterdir():
            if file.is_file():
                os.link(file, folder / file.name)
    names.append(TINY)
    (tmp_path / "penstock.toml").write_text(CONFIG)
    order = random.Random(5)
    flags = (f"--memory={LIMIT}", f"--config={tmp_path / 'penstock.toml'}")
    with served(tmp_path, tmp_path / "serve.log", *flags) as server:
        needed = 0
        for name in names:
            assert ask(server, name).status_code == 200
            row = server.row(name)
            needed += row["weight_bytes"] + KV_LEAST_TOKENS * row["kv_bytes_per_token"]
        assert needed >= 2 * LIMIT, "the test tests less than it says"
        first = own_bytes(server)
        settled: list[float] = []
        for number in range(REQUESTS):
            answer = ask(server, order.choice(names))
            assert answer.status_code == 200, answer.text
            if number % 50 == 49 or number == REQUESTS - 1:  # before older ones are forgotten
                settled += [row["settled_s"] for row in events(server, "unload")]
        last = own_bytes(server)
        sys.stdout.write(
            f"{needed / LIMIT:.2f} x the limit; {len(settled)} unloads seen, {max(settled)} s at "
            f"most; server and template {first} to {last} bytes\n"
        )
        assert max(settled) < 1.0
        assert abs(last - first) <= 0.01 * first
