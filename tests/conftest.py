"""What tests of every kind share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

STARTER = "SmolLM2-135M-Instruct"
_LOAD_S = 300


@pytest.fixture(scope="session")
def starter_folder() -> Path:
    """The folder of the starter model, which `make test` and `make proof` pull first."""
    home = Path(os.environ.get("PENSTOCK_HOME", "~/.penstock")).expanduser()
    folder = home / "models" / STARTER
    if not (folder / "model.safetensors").exists():
        pytest.fail(f"The model {STARTER} is not in {home}: run make model.")
    return folder


@pytest.fixture(scope="session")
def real_url(starter_folder: Path) -> Iterator[str]:
    """`penstock serve` as a user starts it, with the starter model loaded."""
    command = [
        sys.executable,
        "-m",
        "penstock",
        "serve",
        "--json",
        "--port=0",
        f"--model={starter_folder.name}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = str(json.loads(server.stdout.readline())["url"])
            _wait_until_ready(url)
            yield url
        finally:
            server.terminate()
            assert server.wait(60) == 0


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + _LOAD_S
    while time.monotonic() < deadline:
        answer = httpx.get(f"{url}/ready", timeout=60)
        if answer.status_code == 200:
            return
        time.sleep(0.2)
    pytest.fail(f"The model was not ready within {_LOAD_S} s: {answer.text}")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread: tiny operations gain nothing from two, and where other processes want
    the cores two threads wait for each other most of the time."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
