"""What tests of every kind share, and which of them may run at the same time.

`make test` first runs two processes (pytest-xdist): tests of one file stay in one of them, and so
do those of `SHARED_SERVERS`. Then it runs those of `SERIAL` alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.errors import PullFailed
from penstock.sources import pull

if TYPE_CHECKING:
    from collections.abc import Iterator

STARTER = "SmolLM2-135M-Instruct"
# These load both cores, or measure how much memory or time a whole server takes.
SERIAL = (
    "tests/hostile/",
    "tests/integration/test_hard_cap.py",
    "tests/integration/test_neighbour.py",
    "tests/integration/test_rotation_short.py",
    "tests/integration/server/test_metrics_clock.py",
)
# These use `real_url` and `fake_url`: each is started once.
SHARED_SERVERS = ("tests/browser/", "tests/clients/", "tests/e2e/")
# These take minutes: two processes have an even load if they come first.
LONG = (
    "shared servers",
    "tests/integration/test_exactness_starter.py",
    "tests/integration/test_guard_chain.py",
    "tests/integration/test_memory_worker.py",
    "tests/integration/test_packed_weights.py",
)
_LOAD_S = 300

if find_spec("hypothesis"):  # tests/gpu run where it may be missing
    from hypothesis import HealthCheck, settings

    _UNTIMED = settings(deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
    settings.register_profile("short", _UNTIMED, max_examples=100)
    settings.register_profile("long", _UNTIMED, max_examples=2000)
    settings.load_profile(os.environ.get("PENSTOCK_HYPOTHESIS", "short"))


def _group(nodeid: str) -> str:
    """Tests of one group follow each other in one process."""
    file = nodeid.partition("::")[0]
    return "shared servers" if file.startswith(SHARED_SERVERS) else file


def _rank(group: str) -> int:
    return 0 if group in LONG else 2 if group.startswith("tests/unit/") else 1


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark those that run alone; what takes longest comes first."""
    for item in items:
        if item.nodeid.startswith(SERIAL):
            item.add_marker(pytest.mark.serial)
    items.sort(key=lambda item: _rank(_group(item.nodeid)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out groups, in the order in which they were collected."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = _group
    return scheduler


@pytest.fixture(scope="session")
def starter_folder() -> Path:
    """The folder of the starter model, which `make test` and `make proof` pull first."""
    home = Path(os.environ.get("PENSTOCK_HOME", "~/.penstock")).expanduser()
    folder = home / "models" / STARTER
    if not (folder / "model.safetensors").exists():
        pytest.fail(f"The model {STARTER} is not in {home}: run make model.")
    return folder


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The folder of a small real embedder, fetched where it is not there yet."""
    home = Path(os.environ.get("PENSTOCK_HOME", "~/.penstock")).expanduser()
    try:
        return pull("minilm", home, lambda *_: None).path
    except PullFailed as error:
        pytest.skip(f"the embedder cannot be fetched: {error.message}")


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
