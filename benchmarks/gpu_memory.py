"""A server on a card that others use too: little room, mixed requests, a restless neighbour.

    python -m benchmarks.gpu_memory [--free 26GiB] [--memory 24GiB] [--requests 300]

One process holds all of the card but `--free`. Another takes 2 GiB and frees it, in turns.
Requests of 1 to 30,000 tokens are sent 48 at a time; one in twenty-five is longer than the window
and must be refused. What the server's processes hold is read from the driver.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks.report import record
from benchmarks.serving import wait_until_ready
from penstock.config.parsers import parse_size
from penstock.memory.readings.gauge import read_gpus

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "random:qwen3-8b"
WINDOW = 40960
AT_ONCE = 48
LARGE = 0.8  # steps are large whose prediction is at least this share of the largest
_GAUGES = {
    "predicted": "penstock_step_predicted_bytes",
    "measured": "penstock_step_measured_bytes",
    "exhausted": "penstock_oom_steps_total",
}

_BALLAST = """
import sys, time, torch
free = torch.cuda.mem_get_info()[0]
held = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print(torch.cuda.mem_get_info()[0], flush=True)
time.sleep(3600)
"""
_NEIGHBOUR = """
import time, torch
while True:
    try:
        held = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        print("refused", flush=True)
    time.sleep(1.5)
    held = None
    torch.cuda.empty_cache()
    time.sleep(1.5)
"""


@dataclass
class Watch:
    """What was read while requests ran."""

    peaks: collections.Counter[int] = field(default_factory=collections.Counter)  # by process
    samples: list[dict[str, float]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self, url: str) -> None:
        """Read until `over`."""
        with httpx.Client(base_url=url, timeout=5) as client:
            while not self.over.wait(0.1):
                for pid, held in _driver_bytes().items():
                    self.peaks[pid] = max(self.peaks[pid], held)
                with contextlib.suppress(httpx.HTTPError):
                    self.samples.append(_gauges(client.get("/metrics").text))

    def figures(self) -> dict[str, Any]:
        """The envelope: how often it was too low, and how far above the largest steps it is."""
        known = [s for s in self.samples if s.get("predicted") and s.get("measured")]
        largest = max((s["predicted"] for s in known), default=0.0)
        large = [s["predicted"] / s["measured"] for s in known if s["predicted"] > LARGE * largest]
        above = sorted(s["measured"] / s["predicted"] for s in known)
        return {
            "samples": len(known),
            "measured_above_predicted": sum(share > 1 for share in above),
            "measured_over_predicted_most": round(above[-1], 3) if above else None,
            "largest_predicted_mib": round(largest / 2**20),
            "large_samples": len(large),
            "predicted_over_measured_largest": [round(min(large), 3), round(max(large), 3)]
            if large
            else None,
            "steps_exhausted": max((s.get("exhausted", 0) for s in self.samples), default=None),
        }


def main() -> None:
    """Fill the card, serve, send, print what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--free", default="26GiB")
    parser.add_argument("--memory", default="24GiB")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--port", type=int, default=8012)
    options = parser.parse_args()
    url = f"http://127.0.0.1:{options.port}"
    watch = Watch()
    with contextlib.ExitStack() as stack:
        ballast = stack.enter_context(_program(_BALLAST, str(parse_size(options.free))))
        assert ballast.stdout is not None
        free_bytes = int(ballast.stdout.readline())
        others = set(_driver_bytes())
        server = stack.enter_context(_server(options))
        wait_until_ready(url, server)
        workers = set(_driver_bytes()) - others
        stack.enter_context(_program(_NEIGHBOUR))
        thread = threading.Thread(target=watch.run, args=(url,))
        thread.start()
        started = time.perf_counter()
        try:
            answers = asyncio.run(_send(url, options.requests))
        finally:
            watch.over.set()
            thread.join()
        seconds = time.perf_counter() - started
        alive = workers <= set(_driver_bytes())
        events = httpx.get(f"{url}/admin/api/events").json()
    peak = max((watch.peaks[pid] for pid in workers), default=0)
    record(
        "gpu_memory",
        {
            "free_gib": round(free_bytes / 2**30, 2),
            "limit": options.memory,
            "seconds": round(seconds, 1),
            "answers": {f"{kind} {status}": n for (kind, status), n in answers.items()},
            "worker_lived": alive and bool(workers),
            "peak_gib": round(peak / 2**30, 3),
            "peak_within_limit": 0 < peak <= parse_size(options.memory),
            **watch.figures(),
            "events": dict(collections.Counter(str(event["event"]) for event in events)),
        },
    )


def _driver_bytes() -> dict[int, int]:
    """What each process holds of the card."""
    return dict(read_gpus()[0].processes)


def _gauges(text: str) -> dict[str, float]:
    lines = text.splitlines()
    return {
        name: float(line.rsplit(" ", 1)[1])
        for name, metric in _GAUGES.items()
        for line in lines
        if line.startswith((metric + "{", metric + " "))
    }


async def _send(url: str, requests: int) -> collections.Counter[tuple[str, int]]:
    """Status codes, of those that fit and of those that never can."""
    chance = random.Random(5)
    bodies = iter([_body(number, chance) for number in range(requests)])
    answers: collections.Counter[tuple[str, int]] = collections.Counter()

    async def client(http: httpx.AsyncClient) -> None:
        for body in bodies:
            answer = await http.post("/v1/completions", json=body)
            kind = "impossible" if len(body["prompt"]) >= WINDOW else "possible"
            answers[kind, answer.status_code] += 1

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        await asyncio.gather(*(client(http) for _ in range(AT_ONCE)))
    return answers


def _body(number: int, chance: random.Random) -> dict[str, Any]:
    kind = chance.random()
    if kind < 0.04:
        length = WINDOW + chance.randint(1, 20_000)
    else:
        length = chance.randint(8000, 30_000) if kind < 0.12 else chance.randint(1, 1500)
    return {
        "model": MODEL,
        "prompt": "".join(chance.choices("abcdefgh ", k=length)),
        "max_tokens": chance.randint(1, 200),
        "temperature": (0, 0.8)[number % 2],
        "top_p": (1.0, 0.9, 0.95)[number % 3],
        "ignore_eos": True,
        **({"logprobs": 3} if number % 11 == 0 else {}),
    }


@contextlib.contextmanager
def _program(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[subprocess.Popen[bytes]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "penstock", "serve", "--model", MODEL, "--device", "cuda"]
        command += ["--port", str(options.port), "--memory", options.memory]
        process = subprocess.Popen(command, env={**os.environ, "PENSTOCK_HOME": folder})
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)
            for file in (Path(folder) / "logs").glob("*.log"):
                lines = file.read_text(errors="replace").splitlines()
                print("\n".join(line for line in lines if "steps hold" in line), flush=True)


if __name__ == "__main__":
    main()
