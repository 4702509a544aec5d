"""A page that is left open for an hour does not grow the server.

`PENSTOCK_PAGE_S` sets another length; with `PENSTOCK_BENCH_MACHINE` the run is recorded. The page
shows memory beside a chat every ten seconds, so that every kind of row comes through its stream.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import httpx
import pytest
from benchmarks.report import median, record

from penstock.testing.browser import CHROMIUM, Tab, launched
from penstock.testing.hostile import home_for
from penstock.testing.served import served

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.proof

SECONDS = float(os.environ.get("PENSTOCK_PAGE_S", "3600"))
CHAT_EVERY_S = 10.0
# Quarters of the time. In the first events, timelines and heaps fill to their bounds, and what the
# start took is given back.
SECOND, LAST = (0.25, 0.5), (0.75, 1.0)
GROWN_BYTES = 2 << 20


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt install chromium")
def test_the_server_does_not_grow(starter_folder: Path, tmp_path: Path) -> None:
    folder = home_for(starter_folder, tmp_path)
    flags = ("--memory=2GiB", f"--model={folder.name}")
    environment = {"PENSTOCK_MODELS_THREADS": "1"}
    readings: list[tuple[float, float]] = []
    with (
        served(tmp_path, tmp_path / "log", *flags, environment=environment) as server,
        launched() as browser,
    ):
        server.wait_until_ready()
        tab = Tab(browser.new_page(), server.url)
        tab.watch()
        page = tab.show("memory")
        begun = time.monotonic()
        while (at_s := time.monotonic() - begun) < SECONDS:
            chat(server.url, folder.name)
            process = server.get("/admin/api/memory")["processes"]["server"]
            readings.append((at_s, process["private_bytes"]))
            page.wait_for_timeout(CHAT_EVERY_S * 1000)
        assert page.locator("[data-at]").count()  # it still shows rows of the stream
        assert tab.problems == []
    second, last = (
        [read for at_s, read in readings if begin <= at_s / SECONDS < end]
        for begin, end in (SECOND, LAST)
    )
    record(
        "page.left_open",
        {
            "seconds": round(SECONDS),
            "chats": len(readings),
            "at first, MiB": _mib(readings[0][1]),
            "median of the second quarter, MiB": _mib(median(second)),
            "median of the last quarter, MiB": _mib(median(last)),
            "at most in the last quarter, MiB": _mib(max(last)),
        },
    )
    assert median(last) <= median(second) + GROWN_BYTES


def _mib(size: float) -> float:
    return round(size / (1 << 20), 2)


def chat(url: str, model: str) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Say one word."}],
        "max_tokens": 8,
    }
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
