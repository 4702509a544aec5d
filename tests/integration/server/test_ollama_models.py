"""Ollama's routes about models over a fake worker: names, what is loaded, how long, pulls."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock import sources
from penstock.errors import PullFailed
from penstock.testing.fake_server import add_model, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HI = {"messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 2}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home: Path = tmp_path_factory.mktemp("home")
    add_model(home, "echo")
    add_model(home, "other")
    (home / "penstock.toml").write_text(
        '[models.other]\nalias = ["short", "tagged:latest"]\nttl = "10s"\ntemperature = 0.5\n'
    )
    return home


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[httpx.Client]:
    with serving(home) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def chat(client: httpx.Client, model: str, **fields: Any) -> httpx.Response:
    return client.post("/api/chat", json={"model": model, "stream": False, **HI, **fields})


def loaded(client: httpx.Client) -> dict[str, Any]:
    return {row["name"]: row for row in client.get("/api/ps").json()["models"]}


def left_s(row: Any) -> float:
    until = datetime.fromisoformat(row["expires_at"])
    return (until - datetime.now(until.tzinfo)).total_seconds()


def test_digests_are_told_apart_and_stay(client: httpx.Client) -> None:
    tags = client.get("/api/tags").json()["models"]
    digests = {model["name"]: model["digest"] for model in tags}
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests.values())
    assert digests["echo"] != digests["other"] == digests["short"]
    again = client.get("/api/tags").json()["models"]
    assert digests == {model["name"]: model["digest"] for model in again}


@pytest.mark.parametrize(
    ("name", "model"),
    [("echo:latest", "echo"), ("short:latest", "other"), ("tagged:latest", "other")],
)
def test_a_name_without_a_tag_is_the_latest(client: httpx.Client, name: str, model: str) -> None:
    before = loaded(client)
    assert chat(client, name).json()["model"] == name  # as it was asked for
    assert set(loaded(client)) == {*before, model}
    assert client.post("/api/show", json={"model": name}).status_code == 200
    assert client.get(f"/v1/models/{name}").json()["root"] == model


def test_other_tags_are_other_models(client: httpx.Client) -> None:
    assert chat(client, "echo:7b").status_code == 404


def test_the_version_is_one_that_clients_accept(client: httpx.Client) -> None:
    said = client.get("/api/version").json()
    assert tuple(map(int, said["version"].split("."))) >= (0, 6, 4)
    assert said["penstock"] == "0.1.0"


def test_show_has_what_their_command_line_prints(client: httpx.Client) -> None:
    shown = client.post("/api/show", json={"name": "other"}).json()
    assert shown["details"]["quantization_level"]
    assert shown["details"]["parameter_size"].endswith("M")
    assert {"llama.context_length", "llama.embedding_length"} <= set(shown["model_info"])
    assert shown["model_info"]["general.basename"] == "other"
    assert shown["parameters"].split() == ["temperature", "0.5"]
    assert "FROM other" in shown["modelfile"]


def test_keep_alive_is_kept_within_the_ttl(client: httpx.Client) -> None:
    assert chat(client, "echo").status_code == 200
    assert loaded(client)["echo"]["expires_at"].startswith("2318-")
    assert chat(client, "echo", keep_alive="1h30m").status_code == 200
    assert left_s(loaded(client)["echo"]) == pytest.approx(5400, abs=30)
    assert chat(client, "echo", keep_alive=60.5).status_code == 200
    assert left_s(loaded(client)["echo"]) == pytest.approx(60, abs=30)
    assert chat(client, "echo", keep_alive=-1).status_code == 200
    assert loaded(client)["echo"]["expires_at"].startswith("2318-")
    assert chat(client, "other", keep_alive="-1m").status_code == 200
    row = loaded(client)["other"]
    assert left_s(row) < 11  # the operator's ttl
    assert row["size"] > 0
    assert row["context_length"] > 0
    assert chat(client, "echo", keep_alive="soon").status_code == 400


def test_a_model_that_is_kept_for_no_time_goes_after_its_answer(client: httpx.Client) -> None:
    answer = chat(client, "echo", keep_alive=0)
    assert answer.json()["message"]["content"] == "us"
    deadline = time.monotonic() + 15
    while "echo" in loaded(client):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # The wish of an earlier client does not outlive the model.
    assert chat(client, "echo").status_code == 200
    assert loaded(client)["echo"]["expires_at"].startswith("2318-")


def test_with_keys_a_client_does_not_unload_for_others(tmp_path: Path) -> None:
    add_model(tmp_path, "echo")
    headers = {"authorization": "Bearer k"}
    with (
        serving(tmp_path, server_api_keys=["k"]) as server,
        httpx.Client(base_url=server.url, timeout=30, headers=headers) as client,
    ):
        assert chat(client, "echo", keep_alive=0).status_code == 200
        assert loaded(client)["echo"]["expires_at"].startswith("2318-")
        refused = client.post("/api/generate", json={"model": "echo", "keep_alive": 0})
        assert refused.status_code == 403
        assert "models.keep_alive" in refused.json()["error"]


def test_a_pull_of_what_is_there(client: httpx.Client) -> None:
    with client.stream("POST", "/api/pull", json={"model": "echo:latest"}) as answer:
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert [line["status"] for line in lines] == ["pulling manifest", "success"]
    whole = client.post("/api/pull", json={"name": "short", "stream": False})
    assert whole.json() == {"status": "success"}


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("hf.co/Qwen/Qwen3-0.6B:Q4_K_M", 403, "penstock pull hf:Qwen/Qwen3-0.6B"),
        ("smollm2", 403, "server.client_pulls"),
        ("llama3.2", 404, "hf.co/ORG/NAME"),
        ("/etc", 404, "no model"),
        ("random:tiny-llama", 404, "no model"),
        ("", 400, "model"),
    ],
)
def test_a_pull_of_what_is_not_there(
    client: httpx.Client, name: str, status: int, says: str
) -> None:
    refused = client.post("/api/pull", json={"model": name})
    assert refused.status_code == status, refused.text
    assert says in refused.json()["error"]


def test_a_pull_where_clients_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetch(spec: str, home: Path, progress: Any) -> None:
        asked.append(spec)
        if spec == "hf:no/one":
            raise PullFailed("There is no such repository.")
        for done in range(4):
            progress("weights", done, 3)
            time.sleep(0.3)

    monkeypatch.setattr(sources, "pull", fetch)
    with (
        serving(tmp_path, server_client_pulls=True) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        with client.stream("POST", "/api/pull", json={"model": "hf.co/a/b"}) as answer:
            lines = [json.loads(line) for line in answer.iter_lines()]
        assert lines[-1] == {"status": "success"}
        assert len(lines) > 2
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", line["digest"]) for line in lines[:-1])
        failed = client.post("/api/pull", json={"model": "hf:no/one", "stream": False})
        assert failed.status_code == 502
        assert failed.json() == {"error": "There is no such repository."}
    assert asked == ["hf:a/b", "hf:no/one"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/api/delete"),
        ("POST", "/api/copy"),
        ("POST", "/api/create"),
        ("POST", "/api/push"),
        ("POST", f"/api/blobs/sha256:{'0' * 64}"),
    ],
)
def test_what_is_not_offered_says_so(client: httpx.Client, method: str, path: str) -> None:
    refused = client.request(method, path, json={"model": "echo", "input": "x"})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("Not offered by this server: ")
