"""A home that cannot be written, is full, or becomes full: the server starts, serves and says so.

Needs the right to mount: a small tmpfs is a disk that fills up, a read-only one cannot be written.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.catalog import Catalog
from penstock.testing.fake_server import FakeServer, add_model, serving
from penstock.testing.fake_worker import FakeModel
from penstock.testing.served import served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20


@contextmanager
def disk(folder: Path, size: int = 4 * MIB) -> Iterator[Path]:
    """A file system of its own at `folder`."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=False
    )
    if made.returncode != 0:
        pytest.skip("needs the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def models_beside(home: Path, behaviour: FakeModel | None = None) -> list[str]:
    """A model on another disk: the fake worker counts its loads in the model's folder."""
    add_model(home.parent / "beside", "m", behaviour)
    return [str(home.parent / "beside" / "models")]


def fill(home: Path) -> Path:
    """Take all that is left."""
    ballast = home / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 16, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return ballast


def ask(server: FakeServer, **more: Any) -> httpx.Response:
    body = {"model": "m", "input": "hello", "max_output_tokens": 4, **more}
    return httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)


def events(server: FakeServer) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = httpx.get(f"{server.url}/admin/api/events").json()
    return rows


def troubles(server: FakeServer) -> list[str]:
    return [str(row["reason"]) for row in events(server) if row["event"] == "responses not stored"]


def check_serves_unstored(server: FakeServer, why: str) -> None:
    """Everything but the store works, and the store says what is wrong with it."""
    answer = ask(server)
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] in ("completed", "incomplete")
    assert answer.json()["store"] is False
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=chat).status_code == 200
    [trouble] = troubles(server)
    assert why in trouble
    refused = ask(server, background=True)
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_unavailable")
    assert why in refused.json()["error"]["message"]
    with httpx.stream(
        "POST",
        f"{server.url}/v1/responses",
        json={"model": "m", "input": "hello", "max_output_tokens": 4, "stream": True},
    ) as stream:
        words = stream.read().decode()
    assert "response.failed" not in words and '"store":false' in words


def test_a_full_home(tmp_path: Path) -> None:
    with disk(tmp_path / "home") as home:
        models = models_beside(home)
        ballast = fill(home)
        with serving(home, models_dirs=models) as server:
            check_serves_unstored(server, "is full")
            ballast.unlink()
            stored = ask(server).json()
            assert stored["store"] is True
            again = ask(server, previous_response_id=stored["id"])
            assert again.status_code == 200
            assert [row["event"] for row in events(server)][-1] == "responses stored again"


def test_a_read_only_home(tmp_path: Path) -> None:
    with disk(tmp_path / "home") as home:
        models = models_beside(home)
        subprocess.run(["mount", "-o", "remount,ro", str(home)], check=True)
        with serving(home, models_dirs=models) as server:
            check_serves_unstored(server, "must be writable")
            refused = ask(server, previous_response_id="resp_1")
            assert refused.status_code == 507
            assert "must be writable" in refused.json()["error"]["message"]


def test_a_damaged_store(tmp_path: Path) -> None:
    add_model(tmp_path, "m")
    (tmp_path / "responses.db").write_bytes(os.urandom(20_000))
    with serving(tmp_path) as server:
        check_serves_unstored(server, "is damaged")
        (tmp_path / "responses.db").unlink()
        assert ask(server).json()["store"] is True


def test_a_file_where_the_home_has_its_folders(tmp_path: Path) -> None:
    add_model(tmp_path, "m")
    for name in ("logs", "profiles", "cache"):
        (tmp_path / name).write_text("in the way")
    with serving(tmp_path) as server:
        assert ask(server).json()["store"] is True


def test_a_background_response_whose_disk_fills(tmp_path: Path) -> None:
    with disk(tmp_path / "home") as home:
        models = models_beside(home, FakeModel(step_s=0.05))
        with serving(home, models_dirs=models) as server:
            begun = ask(server, background=True, max_output_tokens=40).json()
            address = f"{server.url}/v1/responses/{begun['id']}"
            ballast = fill(home)
            now = begun
            deadline = time.monotonic() + 30
            while now["status"] in ("queued", "in_progress") and time.monotonic() < deadline:
                time.sleep(0.1)
                now = httpx.get(address).raise_for_status().json()
            assert now["status"] == "failed"
            assert now["error"]["code"] == "storage_unavailable"
            assert "is full" in now["error"]["message"]
            ballast.unlink()
            assert ask(server).json()["store"] is True
            assert httpx.get(address).json() == now
        with serving(home, models_dirs=models) as server:
            assert httpx.get(f"{server.url}/v1/responses/{begun['id']}").json() == now


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_real_worker_serves_from_a_home_that_takes_nothing(tmp_path: Path, trouble: str) -> None:
    models = tmp_path / "beside"
    Catalog([models]).make("random:tiny-llama")
    with disk(tmp_path / "home") as home:
        if trouble == "full":
            fill(home)
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(home)], check=True)
        settings = {"PENSTOCK_MODELS_DIRS": str(models), "PENSTOCK_MODELS_THREADS": "1"}
        with served(home, tmp_path / "log", "--device=cpu", environment=settings) as server:
            body = {"model": "random:tiny-llama", "input": "x" * 600, "max_output_tokens": 4}
            answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=300)
            assert answer.status_code == 200, f"{answer.text}\n{server.words()}"
            assert answer.json()["store"] is False
