"""SIGTERM and SIGINT end a server whose threads are stuck: promptly, with everything it started."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

PATIENCE_S = 40.0
SCRIPT = """
import asyncio, sys, time
from concurrent.futures import ThreadPoolExecutor
from penstock import config
from penstock.catalog import Catalog
from penstock.server import run

find = Catalog.find

def stuck(self, name):
    return time.sleep(3600) if name == "stuck" else find(self, name)

Catalog.find = stuck
pools = []

def announce(started):
    loop = asyncio.get_running_loop()
    for _ in range(64):  # all threads that the loop would have for anything else
        loop.run_in_executor(None, time.sleep, 3600)
    pools.append(ThreadPoolExecutor(1))
    pools[0].submit(time.sleep, 3600)
    print(started.url, flush=True)

environment = {"PENSTOCK_HOME": sys.argv[1], "HF_HUB_CACHE": sys.argv[1] + "/none"}
flags = {"server.port": 0, "server.shutdown_grace_s": sys.argv[2], "models.device": "cpu"}
run.run(config.load(environment=environment, flags=flags), announce)
"""


def children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, path.read_text().split())
    return found


@pytest.mark.parametrize(
    ("signals", "grace"), [([signal.SIGTERM], "0.5"), ([signal.SIGINT] * 2, "600")]
)
def test_stuck_threads_do_not_hold_up_the_end(
    tmp_path: Path, signals: list[signal.Signals], grace: str
) -> None:
    log = tmp_path / "log"
    with (
        log.open("wb") as words,
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path), grace],
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url, log.read_text()

            def ask() -> None:
                with suppress(httpx.HTTPError):
                    httpx.get(f"{url}/v1/models/stuck", timeout=None)

            client = threading.Thread(target=ask, daemon=True)
            client.start()
            time.sleep(0.3)
            assert client.is_alive()
            born = children(process.pid)
            for number in signals:
                process.send_signal(number)
                time.sleep(0.2)
            begun = time.monotonic()
            code = process.wait(PATIENCE_S)
        finally:
            process.kill()
    assert code == 0, log.read_text()
    assert time.monotonic() - begun < PATIENCE_S
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in born) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in born if Path(f"/proc/{pid}").exists()]
