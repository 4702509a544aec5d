"""`Retry-After` is true: who is refused and comes back exactly then finds a place.

A real server with a real (tiny) model and a short line. A first rush shows the server its own
speed; of the second everyone who is refused comes back once, at the very second that was told.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock import shapes
from penstock.testing.served import served

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.proof

REFUSED = 100
CLIENTS = 140
SETTINGS = {"PENSTOCK_SERVER_QUEUE_REQUESTS": "16", "PENSTOCK_MODELS_STEP_SEQUENCES": "8"}


def body(dice: random.Random) -> dict[str, Any]:
    tokens = dice.randrange(40, 120)
    return {"prompt": [5] * 20, "max_tokens": tokens, "ignore_eos": True}


@dataclass
class Refused:
    at: float
    numbers: dict[str, Any]
    back: bool  # accepted when it came back


async def one(client: httpx.AsyncClient, content: dict[str, Any]) -> Refused | None:
    """A client; who is refused comes back once, exactly when told."""
    answer = await client.post("/v1/completions", json=content)
    if answer.status_code == 200:
        return None
    assert answer.status_code == 503, answer.text
    at = time.time()
    await asyncio.sleep(int(answer.headers["retry-after"]))
    again = await client.post("/v1/completions", json=content)
    assert again.status_code in (200, 503), again.text
    return Refused(at, answer.json()["error"]["penstock"], again.status_code == 200)


async def rush(url: str, count: int, seed: int) -> list[Refused]:
    """Everyone at once."""
    dice, limits = random.Random(seed), httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        ends = await asyncio.gather(*(one(client, body(dice)) for _ in range(count)))
    return [end for end in ends if end is not None]


def starts(log: Path) -> list[float]:
    """When requests that had to wait went to the worker, from the access log."""
    found = []
    for line in log.read_text("utf-8").splitlines():
        row = json.loads(line)
        if row.get("route") == "/v1/completions" and row.get("status") == 200:
            ended = datetime.fromisoformat(row["time"]).timestamp()
            if row["queue_ms"] > 2:
                found.append(ended - row["total_ms"] / 1e3 + row["queue_ms"] / 1e3)
    return sorted(found)


def test_of_a_hundred_who_come_back_ninety_are_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models" / "tiny-llama"
    folder.mkdir(parents=True)
    shapes.write_folder("random:tiny-llama", folder)
    log = tmp_path / "serve.log"

    with served(tmp_path, log, "--model=tiny-llama", environment=SETTINGS) as server:
        server.wait_until_ready()
        asyncio.run(rush(server.url, 60, 1))  # what a server that was never busy cannot know
        refused = asyncio.run(rush(server.url, CLIENTS, 2))
    assert len(refused) >= REFUSED
    back, went = [one.back for one in refused], starts(log)
    errors = []
    for one in refused:
        after = [start - one.at for start in went if start > one.at]
        if len(after) >= (place := one.numbers["place"]):
            real = after[place - 1]
            errors.append(abs(one.numbers["expected_s"] - real) / max(real, 0.1))
    with capsys.disabled():
        print(  # noqa: T201 - what docs/proof.md records
            f"\n{len(back)} refused, {sum(back)} accepted when they came back; median error of the "
            f"estimate {statistics.median(errors):.2f} over {len(errors)}"
        )
    assert sum(back) >= 0.9 * len(back)
    assert statistics.median(errors) <= 0.3
