"""A server over a fake model for all of this folder, and one over the real starter model."""

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

from penstock.testing.fake_server import add_model, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

STARTER = "SmolLM2-135M-Instruct"
_LOAD_S = 300


@pytest.fixture(scope="session")
def fake_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "fake")
    with serving(home) as server:
        yield server.url


@pytest.fixture(scope="package")
def real_url() -> Iterator[str]:
    """`penstock serve` as a user starts it, with the starter model loaded."""
    home = Path(os.environ.get("PENSTOCK_HOME", "~/.penstock")).expanduser()
    if not (home / "models" / STARTER / "model.safetensors").exists():
        pytest.fail(f"The model {STARTER} is not in {home}: run make model.")
    command = [
        sys.executable,
        "-m",
        "penstock",
        "serve",
        "--json",
        "--port=0",
        f"--model={STARTER}",
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
