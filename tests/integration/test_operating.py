"""`penstock serve` and the commands that operate it, each a process of its own, over a tiny model:
load, ^C, pin, unload, a time to live, and settings that are read again while it runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock import shapes
from penstock.testing.served import Served, served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SETTINGS = """
[models]
threads = 1
kv_tokens = 4096
ttl = {ttl}
[models."org/slow"]
kv_tokens = 256
[models."org/tiny"]
alias = ["t"]
max_context = {context}
{further}
"""


def write_settings(home: Path, ttl: float = 0, context: int = 512, further: str = "") -> None:
    text = SETTINGS.format(ttl=ttl, context=context, further=further)
    (home / "penstock.toml").write_text(text, "utf-8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    home = tmp_path_factory.mktemp("operating")
    # The latter takes many seconds to be measured with one thread.
    for name, shape in (("tiny", "random:tiny-llama"), ("slow", "random:big-kv")):
        folder = home / "models" / "org" / name
        folder.mkdir(parents=True)
        shapes.write_folder(shape, folder)
    write_settings(home)
    with served(home, home / "log", "--device=cpu") as server:
        yield server, home


def command(server: Served, home: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", *words, "--url", server.url],
        env={**os.environ, "PENSTOCK_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests that run in the background inherit that ^C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )


def run(server: Served, home: Path, *words: str) -> Any:
    process = command(server, home, *words, "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out)


def until(condition: Callable[[], bool], server: Served) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, server.words()
        time.sleep(0.02)


def events(server: Served) -> list[str]:
    return [row["event"] for row in server.get("/admin/api/events")]


def unloads(server: Served) -> list[str]:
    rows = server.get("/admin/api/events")
    return [row["reason"] for row in rows if row["event"] == "unload"]


def test_a_days_work(server: tuple[Served, Path]) -> None:
    served_, home = server
    loading = command(served_, home, "load", "org/slow")
    until(lambda: any(r["state"] == "loading" for r in served_.get("/admin/api/models")), served_)
    loading.send_signal(signal.SIGINT)
    _, err = loading.communicate(timeout=60)
    assert (loading.returncode, "called off" in err) == (130, True)
    until(lambda: served_.row("org/slow")["state"] == "absent", served_)
    owners = served_.get("/admin/api/memory")["domains"]["ram"]["owners"]
    assert "model:org/slow" not in owners

    row = run(served_, home, "load", "t")
    assert (row["name"], row["state"], row["context"]) == ("org/tiny", "ready", 512)
    assert run(served_, home, "pin", "org/tiny")["pinned"] is True
    [row] = run(served_, home, "ps")
    assert (row["state"], row["pinned"], row["aliases"]) == ("ready", True, ["t"])

    # A pinned model outlives its time; a broken file changes nothing.
    write_settings(home, ttl=0.01, further="nonsense")
    os.kill(served_.pid, signal.SIGHUP)
    until(lambda: "settings refused" in events(served_), served_)
    refused = httpx.post(f"{served_.url}/admin/api/reload")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_config")
    assert served_.row("org/tiny")["ttl_s"] is None

    write_settings(home, ttl=0.01, context=256, further="temperature = 0")
    os.kill(served_.pid, signal.SIGHUP)
    until(lambda: "settings read" in events(served_), served_)
    until(lambda: served_.row("org/tiny").get("context") == 256, served_)
    assert "reload" in events(served_)
    assert "ttl" not in unloads(served_)

    assert run(served_, home, "pin", "t", "--off")["pinned"] is False
    until(lambda: served_.row("org/tiny")["state"] == "absent", served_)
    assert unloads(served_)[-1] == "ttl"
    assert run(served_, home, "unload", "t", "--now") == {"name": "org/tiny", "unloaded": False}
    assert run(served_, home, "ps") == []


def test_what_needs_a_restart_is_named(server: tuple[Served, Path]) -> None:
    served_, home = server
    write_settings(home)
    with (home / "penstock.toml").open("a", encoding="utf-8") as file:
        file.write('[memory]\nlimit = "1GiB"\n[server]\napi_keys = ["k"]\n')
    answer = httpx.post(f"{served_.url}/admin/api/reload").raise_for_status().json()
    assert answer["restart"] == ["memory.limit"]
    assert "server.api_keys" in answer["applied"]
    assert httpx.get(f"{served_.url}/admin/api/models").status_code == 401
    write_settings(home)
    key = {"authorization": "Bearer k"}
    httpx.post(f"{served_.url}/admin/api/reload", headers=key).raise_for_status()
    assert "t" in [row["id"] for row in served_.get("/v1/models")["data"]]
