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


async def rush(client: httpx.AsyncClient, count: int, seed: int) -> list[tuple[float, Any]]:
    """Everyone at once; when each was answered, and how."""
    dice = random.Random(seed)

    async def one(content: dict[str, Any]) -> tuple[float, httpx.Response]:
        answer = await client.post("/v1/completions", json=content)
        return time.time(), answer

    return await asyncio.gather(*(one(body(dice)) for _ in range(count)))


async def come_back(client: httpx.AsyncClient, refusal: httpx.Response, seed: int) -> bool:
    await asyncio.sleep(int(refusal.headers["retry-after"]))
    answer = await client.post("/v1/completions", json=body(random.Random(seed)))
    assert answer.status_code in (200, 503)
    return answer.status_code == 200


def starts(log: Path) -> list[float]:
    """When requests that had to wait went to the worker, from the access log."""
    found = []
    for line in log.read_text("utf-8").splitlines():
        row = json.loads(line)
        if row.get("route") == "/v1/completions" and row.get("status") == 200:
            ended = datetime.fromisoformat(row["time"]).timestamp()
            if row["queue_ms"] > 20:
                found.append(ended - row["total_ms"] / 1e3 + row["queue_ms"] / 1e3)
    return sorted(found)


def test_of_a_hundred_who_come_back_ninety_are_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models" / "tiny-llama"
    folder.mkdir(parents=True)
    shapes.write_folder("random:tiny-llama", folder)
    log = tmp_path / "serve.log"

    async def scenario(url: str) -> tuple[list[bool], list[tuple[float, dict[str, Any]]]]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
            await rush(client, CLIENTS, 1)
            await asyncio.sleep(3)
            answers = await rush(client, CLIENTS, 2)
            refused = [(at, answer) for at, answer in answers if answer.status_code == 503]
            assert len(refused) >= REFUSED
            back = await asyncio.gather(
                *(come_back(client, answer, 100 + n) for n, (_, answer) in enumerate(refused))
            )
            return list(back), [(at, a.json()["error"]["penstock"]) for at, a in refused]

    with served(tmp_path, log, "--model=tiny-llama", environment=SETTINGS) as server:
        server.wait_until_ready()
        back, told = asyncio.run(scenario(server.url))
    went = starts(log)
    errors = []
    for at, numbers in told:
        after = [start - at for start in went if start > at]
        if len(after) >= numbers["place"]:
            real = after[numbers["place"] - 1]
            errors.append(abs(numbers["expected_s"] - real) / max(real, 0.1))
    with capsys.disabled():
        print(  # noqa: T201 - what docs/proof.md records
            f"\n{len(back)} refused, {sum(back)} accepted when they came back; median error of the "
            f"estimate {statistics.median(errors):.2f} over {len(errors)}"
        )
    assert sum(back) >= 0.9 * len(back)
    assert statistics.median(errors) <= 0.3
