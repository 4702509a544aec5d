"""16 streams of the starter model while nobody watches, and while ten pages and a `top` do.

    python -m benchmarks.watchers [--rounds 5] [--requests 32]

A page is a reader of `/admin/api/stream`; one process has all ten and drops what it reads, so that
what is measured is the server's work and not a browser's. `penstock top` is the real one, in a
terminal of its own. Rounds alternate, and the medians of both are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from benchmarks.report import STARTER, median, record
from benchmarks.serving import server

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGES = 10
STREAMS = 16
_READ = """
import selectors, socket, sys
host, port, pages = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
waiting = selectors.DefaultSelector()
for _ in range(pages):
    page = socket.create_connection((host, port))
    page.sendall(b"GET /admin/api/stream HTTP/1.1\\r\\nhost: %s\\r\\n\\r\\n" % host.encode())
    waiting.register(page, selectors.EVENT_READ)
while True:
    for key, _ in waiting.select():
        if not key.fileobj.recv(1 << 20):
            sys.exit("a page was closed")
"""


@contextmanager
def watchers(url: str) -> Iterator[None]:
    """Ten pages and a `top`; all of them stay to the end."""
    parts = urlsplit(url)
    pages = [sys.executable, "-c", _READ, str(parts.hostname), str(parts.port), str(PAGES)]
    terminal, inside = pty.openpty()
    top = [sys.executable, "-m", "penstock", "top", "--url", url]
    drawing = {**os.environ, "TERM": "xterm"}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(pages)),
            stack.enter_context(subprocess.Popen(top, stdin=inside, stdout=inside, env=drawing)),
        ]
        for process in processes:
            stack.callback(process.kill)
        threading.Thread(target=_drain, args=(terminal,), daemon=True).start()
        time.sleep(3)  # until they read
        yield
        assert all(process.poll() is None for process in processes)


def _drain(terminal: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass


def load(url: str, requests: int) -> dict[str, Any]:
    """What `penstock bench serve` measures."""
    command = [sys.executable, "-m", "penstock", "bench", "serve", "--url", url, "--model", STARTER]
    command += [f"--clients={STREAMS}", f"--requests={requests}", "--input=64", "--output=64"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, Any] = json.loads(ran.stdout)
    return figures


def main() -> None:
    """Measure both in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    options = parser.parse_args()
    alone: list[dict[str, Any]] = []
    watched: list[dict[str, Any]] = []
    with server() as url:
        load(url, STREAMS)
        before = _resident(url)
        for _ in range(options.rounds):
            alone.append(load(url, options.requests))
            with watchers(url):
                watched.append(load(url, options.requests))
        grown = _resident(url) - before
    rates = [median([run["output_tokens_per_s"] for run in runs]) for runs in (alone, watched)]
    gaps = [median([run["between_tokens_ms"]["mean"] for run in runs]) for runs in (alone, watched)]
    record(
        "watchers",
        {
            "tokens_per_s_alone": rates[0],
            "tokens_per_s_watched": rates[1],
            "throughput_ratio": round(rates[1] / rates[0], 3),
            "between_tokens_ms_alone": gaps[0],
            "between_tokens_ms_watched": gaps[1],
            "between_tokens_ratio": round(gaps[1] / gaps[0], 3),
            "server_grew_bytes": grown,
        },
    )


def _resident(url: str) -> int:
    memory = httpx.get(f"{url}/admin/api/memory").json()
    return int(memory["processes"]["server"]["private_bytes"])


if __name__ == "__main__":
    main()
