"""`/admin/api/models`: what an operator does to models by name, and how it is told."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator

MODELS = "/admin/api/models"
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home = tmp_path_factory.mktemp("residents")
    add_model(home, "org/fake", FakeModel(load_s=0.3))
    add_model(home, "large", FakeModel(load_error_code="model_exceeds_memory"))
    add_model(home, "slow", FakeModel(load_s=2))
    add_model(home, "slowly large", FakeModel(load_s=0.3, load_error_code="model_exceeds_memory"))
    with serving(home) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def row(client: httpx.Client, name: str) -> Any:
    rows = client.get(MODELS).raise_for_status().json()
    return next(row for row in rows if row["name"] == name)


def test_a_load_is_answered_when_it_is_done(client: httpx.Client) -> None:
    loaded = client.post(f"{MODELS}/org/fake/load").raise_for_status().json()
    assert (loaded["name"], loaded["state"], loaded["pinned"]) == ("org/fake", "ready", False)
    again = client.post(f"{MODELS}/org/fake/load").raise_for_status().json()
    assert again["pid"] == loaded["pid"]
    gone = client.post(f"{MODELS}/org/fake/unload", json={"now": False}).raise_for_status().json()
    assert gone == {"name": "org/fake", "unloaded": True}
    assert row(client, "org/fake")["state"] == "absent"


def test_a_load_is_told_as_it_goes(client: httpx.Client) -> None:
    client.post(f"{MODELS}/org/fake/unload")
    answer = client.post(f"{MODELS}/org/fake/load", json={"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *steps, last = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line]
    assert {"phase": "weights", "done_bytes": 0, "total_bytes": 100} in steps
    assert last == row(client, "org/fake") | {"idle_s": last["idle_s"]}


@pytest.mark.parametrize(("detach", "state"), [(False, "absent"), (True, "ready")])
def test_a_load_whose_asker_leaves(client: httpx.Client, detach: bool, state: str) -> None:
    client.post(f"{MODELS}/slow/unload")
    body = {"stream": True, "detach": detach}
    with client.stream("POST", f"{MODELS}/slow/load", json=body) as answer:
        assert any("weights" in line for line in answer.iter_lines())  # its process runs
    deadline = time.monotonic() + PATIENCE_S
    while row(client, "slow")["state"] != state:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_pin_holds_while_the_model_comes_and_goes(client: httpx.Client) -> None:
    assert client.post(f"{MODELS}/org/fake/pin").json()["pinned"] is True
    client.post(f"{MODELS}/org/fake/unload")
    client.post(f"{MODELS}/org/fake/load")
    assert row(client, "org/fake")["pinned"] is True
    off = client.post(f"{MODELS}/org/fake/pin", json={"pinned": False}).json()
    assert off["pinned"] is False


@pytest.mark.parametrize("act", ["load", "unload", "pin"])
def test_an_unknown_model_is_not_found(client: httpx.Client, act: str) -> None:
    answer = client.post(f"{MODELS}/no/body/{act}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_refusals_of_a_load(client: httpx.Client) -> None:
    for body in ({}, {"stream": True}):
        answer = client.post(f"{MODELS}/large/load", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "model_exceeds_memory")
    late = client.post(f"{MODELS}/slowly large/load", json={"stream": True})
    assert late.status_code == 200  # it had begun to tell
    [*_, last] = [json.loads(line[6:]) for line in late.text.split("\n\n") if line]
    assert last["error"]["code"] == "model_exceeds_memory"
    wrong = client.post(f"{MODELS}/org/fake/pin", json={"pinned": "maybe"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "pinned")
