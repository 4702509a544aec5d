"""What operators see and do while a server runs: stream, requests, refusals, settings, tasks."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.server.observe.broadcast import MAX_READERS
from penstock.server.pipeline.queue import LOOK_AHEAD
from penstock.testing.fake_server import FakeServer, add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S = 30.0
CROWD = LOOK_AHEAD + 3  # of a model that answers one at a time


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "quick")
    add_model(home, "slow", FakeModel(step_s=0.02))
    add_model(home, "single", FakeModel(step_s=0.02))
    (home / "penstock.toml").write_text("[models.single]\nstep_sequences = 1\n", "utf-8")
    with serving(home) as running:
        yield running


@pytest.fixture
def client(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


def until(condition: Callable[[], Any]) -> Any:
    """What it gives, once that is something."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
    return found


def complete(client: httpx.Client, model: str, **more: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"model": model, "prompt": "hello", **more})


class Rows:
    """A reader of the stream."""

    def __init__(self) -> None:
        self.all: list[tuple[int, str, dict[str, Any]]] = []

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [row for _, found, row in list(self.all) if found == kind]

    def read(self, response: httpx.Response) -> None:
        number, kind = 0, ""
        try:
            for line in response.iter_lines():
                name, _, value = line.partition(": ")
                number = int(value) if name == "id" else number
                kind = value if name == "event" else kind
                if name == "data":
                    self.all.append((number, kind, json.loads(value)))
        except (httpx.HTTPError, httpx.StreamError):
            return  # the test is over


@contextmanager
def watching(server: FakeServer, query: str = "", **headers: str) -> Iterator[Rows]:
    rows = Rows()
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
        client.stream("GET", f"/admin/api/stream{query}", headers=headers) as response,
    ):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        reader = threading.Thread(target=rows.read, args=(response,), daemon=True)
        reader.start()
        try:
            yield rows
        finally:
            # Closing would leave the thread in its read.
            response.extensions["network_stream"].get_extra_info("socket").shutdown(
                socket.SHUT_RDWR
            )
            reader.join(PATIENCE_S)


def test_the_stream_tells_states_events_and_refusals(
    server: FakeServer, client: httpx.Client
) -> None:
    with watching(server) as rows, ThreadPoolExecutor(1) as pool:
        until(lambda: rows.of("memory") and rows.of("models") and rows.of("requests"))
        work = pool.submit(complete, client, "slow", max_tokens=120)
        live = until(lambda: [row for row in rows.of("requests") if row["total"]])[0]
        assert live["requests"][0]["model"] == "slow"
        assert complete(client, "quick", prompt="x" * 9000).status_code == 400
        assert until(lambda: rows.of("refusal"))[-1]["fits"]["tokens"] == 4096
        assert "loaded" in {row["event"] for row in rows.of("event")}
        assert work.result().status_code == 200
        until(lambda: rows.of("requests")[-1]["total"] == 0)
    ids = [number for number, _, _ in rows.all]
    assert ids == sorted(set(ids))


def test_the_sums_of_every_memory_row_are_the_books(
    server: FakeServer, client: httpx.Client
) -> None:
    with watching(server, "?kinds=memory") as rows, ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(complete, client, "slow", max_tokens=100)
        until(lambda: len(rows.all) >= 3)
    for row in rows.of("memory"):
        for state in row["domains"].values():
            owners = [size for held in state["owners"].values() for size in held.values()]
            assert sum(owners) == sum(state["purposes"].values()) == state["booked_bytes"]
            assert state["booked_bytes"] <= state["limit_bytes"]
    assert {kind for _, kind, _ in rows.all} == {"memory"}


def test_a_reader_that_comes_back_gets_what_it_missed(
    server: FakeServer, client: httpx.Client
) -> None:
    assert complete(client, "quick", prompt="x" * 9000).status_code == 400
    with watching(server, "?kinds=refusal") as rows:
        until(lambda: rows.all)
        last = rows.all[-1][0]
    assert complete(client, "quick", prompt="y" * 8000).status_code == 400
    for query, headers in (
        (f"?kinds=refusal&since={last}", {}),
        ("?kinds=refusal", {"last-event-id": str(last)}),
    ):
        with watching(server, query, **headers) as rows:
            until(rows.all.copy)
        [row] = rows.of("refusal")
        assert row["numbers"]["needed_tokens"] == 8001


@pytest.mark.parametrize("query", ["?since=x", "?since=-1", "?kinds=nothing"])
def test_a_query_that_means_nothing_is_refused(client: httpx.Client, query: str) -> None:
    assert client.get(f"/admin/api/stream{query}").status_code == 400


def test_there_are_only_so_many_streams(server: FakeServer, client: httpx.Client) -> None:
    clients = [httpx.Client(base_url=server.url, timeout=PATIENCE_S) for _ in range(MAX_READERS)]
    streams = [one.stream("GET", "/admin/api/stream") for one in clients]
    for stream in streams:
        assert stream.__enter__().status_code == 200
    refused = client.get("/admin/api/stream")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    for one in clients:
        one.close()
    until(lambda: _opens(server))
    owners = client.get("/admin/api/memory").json()["domains"]["ram"]["owners"]
    assert 0 < owners["admin stream"]["requests"] < 1 << 20
    assert owners["admin requests"]["requests"] <= 2 << 20


def _opens(server: FakeServer) -> bool:
    with httpx.stream("GET", f"{server.url}/admin/api/stream", timeout=PATIENCE_S) as response:
        return response.status_code == 200


def test_an_operator_ends_requests(client: httpx.Client) -> None:
    with ThreadPoolExecutor(CROWD) as pool:
        work = [pool.submit(complete, client, "single", max_tokens=2000) for _ in range(CROWD)]
        rows = until(lambda: _crowd(client))
        waiting = rows[0]
        running = next(row for row in rows if row["completion_tokens"])
        assert (waiting["state"], waiting["place"], waiting["waits_for"]) == ("queued", 1, "turn")
        assert (running["state"], running["place"]) == ("running", None)
        assert running["kv_bytes"] > 0 < running["bytes"]
        for row in rows:
            answer = client.post(f"/admin/api/requests/{row['id']}/cancel")
            assert answer.json() == {"id": row["id"], "cancelled": True}
        for one in work:
            assert one.result().status_code == 499
            assert one.result().json()["error"]["code"] == "cancelled"
    until(lambda: client.get("/admin/api/requests").json() == [])
    assert client.post("/admin/api/requests/none/cancel").status_code == 404
    assert complete(client, "single", max_tokens=2).status_code == 200


def _crowd(client: httpx.Client) -> list[dict[str, Any]]:
    """All of them, once one is answered and one has yet to be given to the worker."""
    rows: list[dict[str, Any]] = client.get("/admin/api/requests").json()
    whole = len(rows) == CROWD and rows[0]["waits_for"] == "turn"
    return rows if whole and any(row["completion_tokens"] for row in rows) else []


def test_a_stream_that_is_ended_says_so(client: httpx.Client) -> None:
    body = {"model": "slow", "prompt": "hello", "max_tokens": 2000, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        request_id = response.headers["x-request-id"]
        lines = response.iter_lines()
        next(lines)
        with httpx.Client(base_url=client.base_url) as other:
            assert other.post(f"/admin/api/requests/{request_id}/cancel").status_code == 200
        assert '"code":"cancelled"' in "".join(lines)


def test_settings_are_shown_and_changed(client: httpx.Client) -> None:
    def setting(key: str) -> dict[str, Any]:
        rows = client.get("/admin/api/settings").json()["settings"]
        [row] = [row for row in rows if row["key"] == key]
        return dict(row)

    def change(**settings: Any) -> httpx.Response:
        body = {"settings": {key.replace("__", "."): value for key, value in settings.items()}}
        return client.patch("/admin/api/settings", json=body)

    before = setting("server.max_choices")
    assert (before["origin"], before["changeable"], before["holds"]) == ("default", True, "now")
    assert change(server__max_choices=2, models__quick__ttl="5m").json()["applied"] == [
        "server.max_choices", "models.quick.ttl",
    ]  # fmt: skip
    assert setting("server.max_choices")["value"] == 2
    assert setting("server.max_choices")["origin"] == "admin API"
    assert setting("models.quick.ttl")["value"] == 300
    assert complete(client, "quick", prompt=["a", "b", "c"]).status_code == 400
    messages = [{"role": "user", "content": "hello"}]
    for answer in (
        complete(client, "quick", n=3),
        client.post("/v1/chat/completions", json={"model": "quick", "messages": messages, "n": 3}),
    ):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        assert "at most 2 answers are allowed (server.max_choices)" in answer.text
    assert complete(client, "quick", n=2).status_code == 200
    assert client.post("/admin/api/reload").status_code == 200  # the file does not undo it
    assert setting("server.max_choices")["value"] == 2
    # All or none.
    refused = change(server__max_choices=7, server__body_s="soon")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_config")
    assert setting("server.max_choices")["value"] == 2
    assert change(server__max_choices=None, models__quick__ttl=None).status_code == 200
    assert setting("server.max_choices") == before


@pytest.mark.parametrize(
    "key",
    [
        "server.port",
        "server.api_keys",
        "server.no_auth",
        "models.trust_remote_code",
        "nothing.here",
    ],
)
def test_what_needs_a_restart_or_guards_the_server_is_not_changed(
    client: httpx.Client, key: str
) -> None:
    answer = client.patch("/admin/api/settings", json={"settings": {key: "1"}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_config")


def test_tasks_pull_check_and_clear(client: httpx.Client) -> None:
    def ended(body: dict[str, Any]) -> dict[str, Any]:
        began = client.post("/admin/api/tasks", json=body)
        assert began.status_code == 200, began.text
        path = f"/admin/api/tasks/{began.json()['id']}"
        until(lambda: client.get(path).json()["state"] != "running")
        row: dict[str, Any] = client.get(path).json()
        return row

    pulled = ended({"kind": "pull", "source": "random:tiny-llama"})
    assert (pulled["state"], pulled["result"]["name"]) == ("done", "random:tiny-llama")
    assert ended({"kind": "pull", "source": "random:none"})["state"] == "failed"
    verified = ended({"kind": "cache-verify"})
    assert (verified["state"], verified["result"]["bad"]) == ("done", {})
    assert ended({"kind": "cache-clear"})["result"] == {"files": 0, "bytes": 0}
    refused = client.post("/admin/api/tasks", json={"kind": "pull", "source": "/etc"})
    assert refused.status_code == 400
    assert len(client.get("/admin/api/tasks").json()) == 4
    assert client.post("/admin/api/tasks/none/cancel").status_code == 404
    names = [row["name"] for row in client.get("/admin/api/catalog").json()["models"]]
    assert {"quick", "slow", "random:tiny-llama"} <= set(names)
    assert client.get("/admin/api/cache").json()["held_bytes"] >= 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"kind": "cache-clear", "model": "quick"}, "model"),
        ({"kind": "cache-verify", "source": "random:tiny-llama"}, "source"),
        ({"kind": "pull", "source": "random:tiny-llama", "model": "quick"}, "model"),
        ({"kind": "bench", "model": "quick", "source": ""}, "source"),
        ({"kind": "bench", "model": "quick", "clients": 0}, "clients"),
        ({"kind": "cache-clear", "requests": -1}, "requests"),
    ],
)
def test_a_task_is_told_only_what_it_can_use(
    client: httpx.Client, body: dict[str, Any], param: str
) -> None:
    answer = client.post("/admin/api/tasks", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_bench_runs_as_a_task(client: httpx.Client) -> None:
    body = {"kind": "bench", "model": "quick", "clients": 2, "requests": 4, "input": 8, "output": 4}
    began = client.post("/admin/api/tasks", json=body).json()
    path = f"/admin/api/tasks/{began['id']}"
    until(lambda: client.get(path).json()["state"] != "running")
    row = client.get(path).json()
    assert (row["state"], row["error"]) == ("done", None)
    assert row["result"]["requests"] == 4
    assert (row["phase"], row["done"], row["total"]) == ("measuring", 4, 4)  # as its process said
    owners = client.get("/admin/api/memory").json()["domains"]["ram"]["owners"]
    assert "bench" not in owners


def test_the_timeline_grows(client: httpx.Client) -> None:
    points = until(lambda: client.get("/admin/api/timeline").json()["points"])
    assert points[-1]["domains"]["ram"]["booked_bytes"] > 0


def test_a_reader_that_takes_nothing_holds_nobody_up(
    server: FakeServer, client: httpx.Client
) -> None:
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 80)) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(b"GET /admin/api/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
        with watching(server, "?kinds=refusal") as rows:
            for number in range(300):  # more than any socket's buffers and any ring hold
                assert complete(client, "quick", prompt="z" * (5000 + number)).status_code == 400
            until(lambda: rows.of("refusal")[-1]["numbers"]["needed_tokens"] == 5300)
            held = client.get("/admin/api/memory").json()["domains"]["ram"]["owners"]
            assert held["admin stream"]["requests"] < 1 << 20
            assert held["admin requests"]["requests"] <= 2 << 20
    assert len(client.get("/admin/api/refusals").json()) == 256
