"""Workers that hang, stop or die under a whole server, and what it tells of them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel, lives

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HANG_S = 1.0


class Server:
    """What a user and an operator see."""

    def __init__(self, url: str, home: Path) -> None:
        self.url = url
        self.home = home

    def ask(self, model: str, tokens: int = 3) -> httpx.Response:
        body = {"model": model, "prompt": "hi", "max_tokens": tokens}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def stream(self, model: str, tokens: int) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer, as they come."""
        body = {"model": model, "prompt": "hi", "max_tokens": tokens, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def row(self, model: str) -> dict[str, Any]:
        rows = httpx.get(f"{self.url}/admin/api/models", timeout=60).json()
        return next((row for row in rows if row["name"] == model), {})

    def events(self, model: str) -> list[dict[str, Any]]:
        rows = httpx.get(f"{self.url}/admin/api/events", timeout=60).json()
        return [row for row in rows if row.get("model") == model]

    def pid_while(self, model: str, state: str) -> int:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if (row := self.row(model)).get("state") == state and row["pid"]:
                return int(row["pid"])
            time.sleep(0.01)
        raise AssertionError(f"{model} was never {state}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "hangs-late", FakeModel(hang_at_token=2, bad_lives=1))
    add_model(home, "hangs-early", FakeModel(hang_at_token=0, bad_lives=1))
    add_model(home, "stopped", FakeModel(step_s=0.01))
    add_model(home, "steady", FakeModel(step_s=0.01))
    add_model(home, "slow", FakeModel(load_s=0.6))
    add_model(home, "mortal", FakeModel(step_s=0.01))
    add_model(home, "killed", FakeModel(step_s=0.01))
    with serving(home, server_hang_s=str(HANG_S)) as running:
        yield Server(running.url, home)


def test_a_worker_that_hangs_in_an_answer_is_replaced_and_its_client_told(server: Server) -> None:
    *pieces, last = server.stream("hangs-late", 9)
    assert pieces  # two tokens, which may have come in one event
    assert last["error"]["code"] == "worker_restarted"
    assert "no step" in last["error"]["message"]
    assert server.ask("hangs-late").status_code == 200
    kinds = [row["event"] for row in server.events("hangs-late")]
    assert kinds == ["load", "loaded", "hang", "death", "restart", "loaded"]
    hang, death = (row for row in server.events("hangs-late") if row["event"] in {"hang", "death"})
    assert hang["silent_s"] >= hang["patience_s"] >= HANG_S
    assert death["signal"] == "SIGTERM"
    assert death["lost_requests"] == 1


def test_one_that_hangs_before_the_first_token_is_not_noticed(server: Server) -> None:
    answer = server.ask("hangs-early")
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "hih")
    assert lives(server.home / "models" / "hangs-early") == 2


def test_a_stopped_process_is_ended_and_its_neighbour_does_not_notice(server: Server) -> None:
    steady: list[float] = []

    def listen() -> None:
        steady.extend(time.monotonic() for _ in server.stream("steady", 250))

    neighbour = threading.Thread(target=listen)
    neighbour.start()
    events = server.stream("stopped", 1000)
    next(events)
    os.kill(server.row("stopped")["pid"], signal.SIGSTOP)
    *_, last = events
    neighbour.join()
    assert last["error"]["code"] == "worker_restarted"
    death = next(row for row in server.events("stopped") if row["event"] == "death")
    assert death["signal"] == "SIGKILL"  # it could not hear the first one
    assert len(steady) >= 200  # two tokens may come in one event
    assert server.ask("stopped").status_code == 200


def test_a_load_that_is_stopped_is_tried_again(server: Server) -> None:
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(server.ask("slow")))
    client.start()
    os.kill(server.pid_while("slow", "loading"), signal.SIGSTOP)
    client.join()
    assert answers[0].status_code == 200
    kinds = [row["event"] for row in server.events("slow")]
    assert kinds == ["load", "hang", "death", "restart", "loaded"]
    assert server.events("slow")[1]["loading"] is True


def test_a_stopped_idle_worker_is_replaced_when_it_is_needed(server: Server) -> None:
    assert server.ask("mortal").status_code == 200
    os.kill(server.row("mortal")["pid"], signal.SIGSTOP)
    assert server.ask("mortal").status_code == 200
    assert [row["event"] for row in server.events("mortal")][2:4] == ["hang", "death"]


def test_three_deaths_open_the_circuit_and_the_event_says_why(server: Server) -> None:
    for _ in range(3):
        events = server.stream("killed", 1000)
        next(events)
        os.kill(server.row("killed")["pid"], signal.SIGKILL)
        *_, last = events
        assert last["error"]["code"] == "worker_restarted"
    refused = server.ask("killed")
    assert refused.status_code == 503
    assert 200 < float(refused.headers["retry-after"]) <= 300
    rows = server.events("killed")
    deaths = [row for row in rows if row["event"] == "death"]
    assert [row["deaths"] for row in deaths] == [1, 2, 3]
    for death in deaths:
        assert (death["signal"], death["exit_code"], death["lost_requests"]) == ("SIGKILL", None, 1)
        assert death["oom_kill"] in (False, "unknown")
        assert death["freed_bytes"] > 0
        assert isinstance(death["last_lines"], list)
    assert rows[-1]["event"] == "circuit opened"
    # Whoever changes the model's files need not wait for the five minutes.
    FakeModel(step_s=0.001).write(server.home / "models" / "killed")
    assert server.ask("killed").status_code == 200
    kinds = [row["event"] for row in server.events("killed")]
    assert kinds[-3:] == ["circuit closed", "restart", "loaded"]
