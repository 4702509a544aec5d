"""The memory guard through a whole server with fake workers: real sockets, real books."""

from __future__ import annotations

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.heap import trim_heap
from penstock.memory.readings import gauge
from penstock.server import run, wiring
from penstock.server.app import App
from penstock.server.residency import pressure, residency
from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.server.http.exchange import Exchange

CONTEXT = 100_000


def room_for_little() -> str:
    """With this the fake's KV (1 KiB a token) holds less than the window of `huge`, whatever the
    process of these tests, which is the server's too, has grown to."""
    gc.collect()
    trim_heap()  # as the server does when nothing runs
    own = gauge.read_process(os.getpid())
    assert own is not None
    return str(own.anonymous_bytes + (440 << 20))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "fake", FakeModel(context=CONTEXT))
    add_model(home, "huge", FakeModel(context=1 << 20))
    add_model(home, "slow", FakeModel(step_s=0.02))
    return home


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[httpx.Client]:
    with (
        serving(home, memory_limit=room_for_little()) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def complete(client: httpx.Client, prompt: object, **fields: object) -> httpx.Response:
    return client.post("/v1/completions", json={"model": "fake", "prompt": prompt, **fields})


def books(client: httpx.Client) -> dict[str, Any]:
    content: dict[str, Any] = client.get("/admin/api/memory").json()
    return content


def test_the_books_show_who_holds_what_and_return_to_rest(client: httpx.Client) -> None:
    assert complete(client, "hello", max_tokens=3).status_code == 200
    ram = books(client)["domains"]["ram"]
    assert set(ram["owners"]) >= {"server", "fork server", "requests", "model:fake"}
    assert set(ram["owners"]["model:fake"]) == {"process", "weights", "kv", "step"}
    assert ram["booked_bytes"] == sum(sum(held.values()) for held in ram["owners"].values())
    assert ram["booked_bytes"] <= ram["limit_bytes"]
    assert books(client)["requests"] == {"used_bytes": 0, "waiting": 0, "for_tokenizer": {}}


def test_a_prompt_over_the_window_is_refused_without_tokenising(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert complete(client, "hello", max_tokens=1).status_code == 200
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    steps_before = client.get("/metrics").text.count("penstock_steps_total")
    answer = complete(client, "x " * (1 << 20))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["penstock"]["reason"] == "window"
    assert error["penstock"]["needed_tokens"] > CONTEXT
    assert "at least" in error["message"]
    assert encoded == []
    assert client.get("/metrics").text.count("penstock_steps_total") == steps_before


def test_a_prompt_over_the_memory_is_refused_with_the_numbers(client: httpx.Client) -> None:
    for ids in ([5] * 900_000, [5] * 500_000):
        answer = complete(client, ids, model="huge", max_tokens=1)
        assert answer.status_code == 400
        numbers = answer.json()["error"]["penstock"]
        assert numbers["reason"] == "memory"
        assert numbers["domain"] == "ram"
        assert numbers["needed_tokens"] == len(ids) + 1
        assert numbers["limit_tokens"] < len(ids)
        assert numbers["needed_bytes"] > numbers["limit_bytes"]
        assert "memory.limit" in answer.json()["error"]["message"]


def test_a_refusal_says_what_would_have_run(home: Path) -> None:
    with (
        serving(home, memory_limit=room_for_little()) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        assert complete(client, "hi", model="huge", max_tokens=1).status_code == 200
        answer = complete(client, [5] * 900_000, model="huge", max_tokens=1)
        for _ in range(3):  # other programs may take memory in between
            limit = answer.json()["error"]["penstock"]["limit_tokens"]
            answer = complete(client, [5] * (limit - 1), model="huge", max_tokens=1)
            if answer.status_code == 200:
                break
        assert answer.status_code == 200, answer.text


def test_a_plan_says_what_a_request_would_get(client: httpx.Client) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7}
    plan = client.post("/v1/plan", json=body).json()
    assert plan["verdict"] == "accept"
    assert plan["max_tokens"] == 7
    usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    assert plan["prompt_tokens"] == usage["prompt_tokens"]
    assert usage["penstock"]["max_tokens"] == 7
    refused = client.post("/v1/plan", json={"model": "huge", "prompt": [5] * 900_000}).json()
    assert refused["verdict"] == "refuse"
    assert refused["error"]["code"] == "context_length_exceeded"
    assert refused["error"]["penstock"]["reason"] == "memory"


def test_a_plan_of_a_model(client: httpx.Client) -> None:
    query: dict[str, str | int] = {"model": "huge", "context": 1 << 19, "concurrency": 2}
    plan = client.get("/admin/api/plan", params=query).json()
    assert plan["fits"] is False
    assert plan["longest_context"] < 1 << 19
    assert plan["context_at_concurrency"] <= plan["longest_context"]
    assert (
        client.get("/admin/api/plan", params={"model": "fake", "context": "x"}).status_code == 400
    )


def test_a_full_line_is_refused_with_a_time_and_others_go_on(home: Path) -> None:
    with (
        serving(home, server_queue_requests=2, models_step_sequences=1) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        ThreadPoolExecutor(24) as pool,
    ):
        assert complete(client, "hi", model="slow", max_tokens=1).status_code == 200
        answers = list(
            pool.map(lambda _: complete(client, "hi", model="slow", max_tokens=20), range(24))
        )
        refused = [answer for answer in answers if answer.status_code == 503]
        served = [answer for answer in answers if answer.status_code == 200]
        assert refused
        assert served
        assert len(refused) + len(served) == 24
        for answer in refused:
            assert answer.json()["error"]["code"] == "overloaded"
            assert int(answer.headers["retry-after"]) >= 1
        assert client.get("/admin/api/requests").json() == []


def test_everyone_in_line_has_a_place(home: Path) -> None:
    with (
        serving(home, models_step_sequences=1) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        ThreadPoolExecutor(12) as pool,
    ):
        assert complete(client, "hi", model="slow", max_tokens=1).status_code == 200
        work = [pool.submit(complete, client, "hi", model="slow", max_tokens=8) for _ in range(12)]
        deadline = time.monotonic() + 20
        rows: list[dict[str, Any]] = []
        while not rows and time.monotonic() < deadline:
            time.sleep(0.02)
            live = client.get("/admin/api/requests").json()
            rows = [row for row in live if row["place"] is not None]
        assert rows
        assert live[: len(rows)] == rows  # those that wait come first
        assert [row["place"] for row in rows] == list(range(1, len(rows) + 1))
        assert all(row["expected_start_s"] >= 0 for row in rows)
        assert all(future.result().status_code == 200 for future in work)


in_a_request: ContextVar[bool] = ContextVar("in_a_request", default=False)


def test_a_request_reads_no_gauge(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The governor reads; what a handler needs is in the snapshot. A reading that a handler has
    made in another thread counts too: a thread inherits the context."""
    readings: list[bool] = []

    def watched(owner: object, name: str) -> Any:
        real = getattr(owner, name)

        def read(*arguments: Any) -> Any:
            readings.append(in_a_request.get())
            return real(*arguments)

        return read

    answer = App._dispatch

    async def marked(self: App, exchange: Exchange) -> None:
        in_a_request.set(True)
        await answer(self, exchange)

    for module, names in (
        (pressure, ("read_ram", "read_gpus")),
        (gauge.ProcessGauge, ("read",)),
        (residency, ("read_process", "read_gpus")),
        (run, ("read_ram", "read_gpus")),
        (wiring, ("read_process",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, watched(module, name))
    monkeypatch.setattr(App, "_dispatch", marked)
    with (
        # Loaded at the start: a load does read, whoever asked for it.
        serving(home, models_default="fake") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        deadline = time.monotonic() + 30
        while (ready := client.get("/ready")).status_code != 200:
            assert time.monotonic() < deadline, ready.text
            time.sleep(0.02)
        assert complete(client, "hi", max_tokens=3).status_code == 200
        for model in ("fake", "huge"):
            assert client.get(f"/admin/api/plan?model={model}").status_code == 200
            assert client.post("/v1/plan", json={"model": model, "prompt": "hi"}).status_code == 200
        for path in ("/admin/api/memory", "/admin/api/models", "/v1/models", "/metrics"):
            assert client.get(path).status_code == 200
        assert complete(client, [5] * 200_000).status_code == 400
    assert readings
    assert not any(readings)


def test_log_probabilities_beyond_the_memory_are_refused_by_name(client: httpx.Client) -> None:
    answer = complete(client, "hi", n=100, logprobs=20, max_tokens=90_000)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "logprobs"
    few = complete(client, "hi", n=3, logprobs=5, max_tokens=20)
    assert few.status_code == 200
    assert books(client)["requests"]["used_bytes"] == 0


def test_metrics_carry_the_books(client: httpx.Client) -> None:
    assert complete(client, "hi", max_tokens=1).status_code == 200
    text = client.get("/metrics").text
    assert 'penstock_booked_bytes{domain="ram",purpose="kv"}' in text
    assert 'penstock_memory_bytes{domain="ram",what="limit"}' in text


def test_a_model_too_large_for_the_limit_is_507_and_says_not_to_retry(home: Path) -> None:
    with (
        serving(home, memory_limit=room_for_little(), models_kv_tokens=10_000_000) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        answer = complete(client, "hi", max_tokens=1)
        assert answer.status_code == 507
        assert answer.json()["error"]["code"] == "model_exceeds_memory"
        assert answer.headers["x-should-retry"] == "false"
