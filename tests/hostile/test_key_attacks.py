"""What one key can do to another, and what anybody can have written to the disk."""

from __future__ import annotations

import asyncio
import contextlib
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.served import served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = "random:tiny-llama"
FLOODER, POLITE = "key-of-the-flooder", "key-of-the-polite"
QUEUE = 64
FLOOD = 140
SETTINGS = {
    "PENSTOCK_SERVER_API_KEYS": f"{FLOODER},{POLITE}",
    "PENSTOCK_SERVER_QUEUE_REQUESTS": str(QUEUE),
    "PENSTOCK_MODELS_THREADS": "1",
}


@dataclass(frozen=True)
class Target:
    url: str
    home: Path

    def client(self, key: str = POLITE) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    home = tmp_path_factory.mktemp("keys")
    log = tmp_path_factory.mktemp("log") / "log"
    flags = (f"--model={MODEL}", "--device=cpu", "--memory=1GiB")
    with served(home / "home", log, *flags, environment=SETTINGS) as server:
        target = Target(server.url, home / "home")
        with target.client() as client:
            deadline = time.monotonic() + 120
            while client.get("/ready").status_code != 200 and time.monotonic() < deadline:
                time.sleep(0.1)
        yield target


def completion(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hello", "max_tokens": 4, **more}


async def flood(client: httpx.AsyncClient, until: asyncio.Event) -> list[int]:
    """Keep the line full of long and urgent requests; the statuses that came back."""
    body = completion(prompt="x" * 500, max_tokens=3000, min_tokens=3000, priority=-100)
    statuses: list[int] = []

    async def one() -> None:
        while not until.is_set():
            answer = await client.post("/v1/completions", json=body)
            statuses.append(answer.status_code)
            await asyncio.sleep(3)

    tasks = [asyncio.ensure_future(one()) for _ in range(FLOOD)]
    await until.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return statuses


def test_a_flood_of_urgent_requests_does_not_hold_up_another_key(target: Target) -> None:
    async def attack() -> tuple[list[int], list[tuple[int, float]]]:
        over = asyncio.Event()
        limits = httpx.Limits(max_connections=None)
        options: dict[str, Any] = {"base_url": target.url, "timeout": 600, "limits": limits}
        async with (
            httpx.AsyncClient(headers={"x-api-key": FLOODER}, **options) as flooder,
            httpx.AsyncClient(headers={"x-api-key": POLITE}, **options) as polite,
        ):
            attack = asyncio.ensure_future(flood(flooder, over))
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:  # until the line is as full as it gets
                live = (await polite.get("/admin/api/requests")).json()
                rows = [row for row in live if row["place"] is not None]
                if len(rows) >= QUEUE * 3 // 4:
                    break
                await asyncio.sleep(0.05)
            assert len(rows) >= QUEUE * 3 // 4, "the flood never filled its part of the line"
            answers = []
            for _ in range(5):
                begun = time.monotonic()
                answer = await polite.post("/v1/completions", json=completion(priority=100))
                answers.append((answer.status_code, time.monotonic() - begun))
            over.set()
            return await attack, answers

    statuses, answers = asyncio.run(attack())
    assert [status for status, _ in answers] == [200] * len(answers), answers
    assert max(took for _, took in answers) < 10, answers
    assert 503 in statuses, "what one key has in the line is bounded"
    assert set(statuses) <= {200, 503}, statuses


def names_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_no_name_makes_a_client_write_a_model(target: Target) -> None:
    models = target.home / "models"
    before = names_below(models)
    other = "random:big-kv"
    chat = {"model": other, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    with target.client() as client:
        answers = [
            client.get(f"/v1/models/{other}"),
            client.get(f"/admin/api/plan?model={other}"),
            client.post("/v1/plan", json=chat),
            client.post("/v1/completions", json=completion(model=other)),
            client.post("/v1/chat/completions", json=chat),
            client.post("/v1/messages", json=chat),
            client.post("/v1/messages/count_tokens", json=chat),
            client.post("/v1/responses", json={"model": other, "input": "hi"}),
            client.post("/api/chat", json=chat),
            client.post("/api/generate", json={"model": other, "prompt": "hi"}),
            client.post("/api/show", json={"model": other}),
        ]
        assert [answer.status_code for answer in answers] == [404] * len(answers)
        assert names_below(models) == before
        # What an operator loads is there for everybody.
        assert client.get("/v1/models/random:big-kv").status_code == 404
        loaded = client.post("/admin/api/models/random:llama-1b/load", json={})
        assert loaded.status_code in (200, 507), loaded.text
        assert client.get("/v1/models/random:llama-1b").status_code == 200


def test_everything_under_the_home_is_the_users_alone(target: Target) -> None:
    with target.client() as client:
        stored = client.post(
            "/v1/responses", json={"model": MODEL, "input": "hello", "max_output_tokens": 4}
        ).raise_for_status()
        assert stored.json()["store"] is True
        long = completion(prompt="y" * 2000)
        assert client.post("/v1/completions", json=long).status_code == 200
    modes = {}
    for path in (target.home, *target.home.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # half a file of KV that is whole by now
            modes[path] = path.lstat().st_mode
    names = {path.name for path in modes}
    assert {"responses.db", "responses.db-wal", "random_tiny-llama.log", "config.json"} <= names
    assert list((target.home / "profiles").iterdir())
    loose = {
        str(path.relative_to(target.home)): oct(mode & 0o777)
        for path, mode in modes.items()
        if mode & 0o077 and not stat.S_ISLNK(mode)
    }
    assert not loose
