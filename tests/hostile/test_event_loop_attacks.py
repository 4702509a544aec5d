"""Nothing in proportion to a body runs on the event loop, nor holds Python's lock for long."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing import bodies
from penstock.testing.fake_server import add_model, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.testing.fake_server import FakeServer

LARGE = 28 << 20  # server.max_body is 32 MiB
ALLOWED_S = 1.0  # on a machine that others use too
PROVEN_S = 0.4

# What has held up the loop, and the dearest of what is taken.
WORST = [
    (bodies.OLLAMA_CHAT, "nothing but zeros"),
    (bodies.CHAT, "stop_token_ids: numbers"),
    (bodies.CHAT, "chat_template_kwargs: short keys"),
    (bodies.CHAT, "logit_bias: short keys"),
    (bodies.CHAT, "unknown: short keys"),
    (bodies.CHAT, "stop: strings"),
    (bodies.CHAT, "messages"),
    (bodies.CHAT, "parts"),
    (bodies.CHAT, "model: zeros"),
    (bodies.CHAT, "one message: escapes"),
    (bodies.CHAT, "one message: wide"),
    (bodies.COMPLETIONS, "prompt: numbers"),
    (bodies.COMPLETIONS, "prompt: nested lists"),
    (bodies.COMPLETIONS, "prompt: text"),
    (bodies.RESPONSES, "reasoning"),
    (bodies.RESPONSES, "metadata: short keys"),
    (bodies.RESPONSES, "input: quotes"),
    (bodies.MESSAGES, "one input"),
    (bodies.MESSAGES, "system: zeros"),
    (bodies.OLLAMA_CHAT, "one call"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "fake")
    with serving(home) as server:
        yield server


def lags(server: FakeServer, names: list[tuple[str, str]], size: int) -> list[dict[str, Any]]:
    """For each body, how it was answered and the longest time that the loop did nothing else."""
    samples: list[tuple[float, float]] = []

    async def sample() -> None:
        while True:
            began = time.time()
            await asyncio.sleep(0.005)
            samples.append((began, time.time() - began - 0.005))

    assert server._loop is not None
    sampler = asyncio.run_coroutine_threadsafe(sample(), server._loop)
    command = [sys.executable, "-m", "penstock.testing.body_client", server.url, str(size)]
    try:
        answer = subprocess.run(
            command, input=json.dumps(names).encode(), stdout=subprocess.PIPE, check=True
        )
    finally:
        sampler.cancel()
    rows: list[dict[str, Any]] = [json.loads(line) for line in answer.stdout.splitlines()]
    assert len(rows) == len(names)
    for row in rows:
        ended = row["began"] + row["taken_s"]
        meanwhile = [lag for at, lag in samples if row["began"] - 0.01 <= at <= ended]
        row["lag_s"] = max(meanwhile, default=0.0)
    return rows


def check(rows: list[dict[str, Any]], allowed_s: float) -> None:
    for row in rows:
        assert 200 <= row["status"] < 500, row
    late = [row for row in rows if row["lag_s"] > allowed_s]
    assert not late, [(row["route"], row["name"], row["lag_s"]) for row in late]


def test_the_worst_bodies_hold_nobody_up(server: FakeServer) -> None:
    check(lags(server, WORST, LARGE), ALLOWED_S)


@pytest.mark.proof
def test_no_body_holds_anybody_up(server: FakeServer) -> None:
    rows = lags(server, list(bodies.shapes()), LARGE)
    rows.sort(key=lambda row: -row["lag_s"])
    for row in rows[:20]:
        print(f"{row['lag_s']:.3f} s", row["route"], row["name"], row["status"])  # noqa: T201
    check(rows, PROVEN_S)


def test_what_is_continued_is_converted_beside_the_loop(server: FakeServer) -> None:
    """A small body may continue a large response."""
    with httpx.Client(base_url=server.url, timeout=120) as client:
        said = {"model": "fake", "max_output_tokens": 1}
        items = [{"type": "reasoning", "content": [{"text": "a"}]}] * 1000
        first = client.post("/v1/responses", json={**said, "input": [*items, _user()]}).json()
        then = {**said, "input": [_user()], "previous_response_id": first["id"]}
        assert client.post("/v1/responses", json=then).status_code == 200


def _user() -> dict[str, str]:
    return {"role": "user", "content": "hi"}
