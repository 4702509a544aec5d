"""The newcomer's path, timed: clone, `make serve`, open the page, ask, read the first answer.

Home and pip cache are empty, so that packages and the model are fetched. With
`PENSTOCK_BENCH_MACHINE` the run is recorded.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from benchmarks.report import STARTER, record

from penstock.testing.browser import CHROMIUM, Tab, launched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.proof

ROOT = Path(__file__).parents[2]
QUESTION = "What is a penstock?"
PATIENCE_S = 1800.0
STOP_S = 60.0
# What this process has of its own venv and settings, and a newcomer has not.
OURS = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")


class Stages:
    """Seconds of one stage after another."""

    def __init__(self) -> None:
        self.begun = self._since = time.monotonic()
        self.took: dict[str, float] = {}

    def ended(self, stage: str) -> None:
        now = time.monotonic()
        self.took[f"{stage}_s"] = round(now - self._since, 1)
        self._since = now


@contextmanager
def make_serve(clone: Path, home: Path, log: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """`make serve` in a session of its own, ended with all that it started."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in OURS and not name.startswith(("PENSTOCK_", "PYTEST_"))
    }
    environment = {**kept, "PENSTOCK_HOME": str(home), "PIP_NO_CACHE_DIR": "1"}
    command = ["make", "serve", f"ARGS=--port={port}"]
    with (
        log.open("wb") as words,
        subprocess.Popen(
            command, cwd=clone, env=environment, stdout=words, stderr=words, start_new_session=True
        ) as process,
    ):
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(STOP_S)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt install chromium")
def test_from_a_clone_to_the_first_answer(tmp_path: Path) -> None:
    clone, home, log = tmp_path / "penstock", tmp_path / "home", tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    stages = Stages()
    subprocess.run(["git", "clone", "--quiet", f"file://{ROOT}", str(clone)], check=True)
    stages.ended("clone")
    with make_serve(clone, home, log, port) as process:

        def until(done: Callable[[], bool]) -> None:
            while not done():
                words = log.read_text("utf-8", "replace")[-4000:]
                assert process.poll() is None, f"make serve ended: {words}"
                assert time.monotonic() - stages.begun < PATIENCE_S, words
                time.sleep(0.1)

        until((clone / ".venv" / ".serve").exists)
        stages.ended("packages")
        until((home / "models" / STARTER / "model.safetensors").exists)
        stages.ended("model")
        until(lambda: _answers(f"http://127.0.0.1:{port}/health"))
        stages.ended("start")
        with launched() as browser:
            _ask(Tab(browser.new_page(), f"http://127.0.0.1:{port}"), stages)
    total_s = round(time.monotonic() - stages.begun, 1)
    record("newcomer", {**stages.took, "total_s": total_s})


def _ask(tab: Tab, stages: Stages) -> None:
    """Open the page, ask, and read."""
    tab.watch()
    page = tab.page
    page.set_default_timeout(PATIENCE_S * 1000)
    page.goto(f"{tab.url}/")
    page.get_by_text(f"{STARTER} answers on this server").wait_for()
    stages.ended("page")
    page.get_by_label("Message", exact=True).fill(QUESTION)
    page.get_by_label("Message", exact=True).press("Enter")
    page.wait_for_function(
        "() => document.querySelector('.answer .problem')"
        " ?? document.querySelector('.answer .body')?.textContent.trim()"
    )
    assert page.locator(".answer .problem").all_inner_texts() == []
    stages.ended("first_words")
    page.locator("[data-figures]").wait_for()
    stages.ended("rest_of_the_answer")
    assert tab.problems == []


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
