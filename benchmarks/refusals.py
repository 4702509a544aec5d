"""How early and how quickly a prompt that cannot fit is refused.

    python -m benchmarks.refusals

decide    the verdict itself, with 1,000 requests waiting and books that move between any two
refusal   a real server and a prompt of 110,000 tokens: from the last byte of the request to the
          last of the 400, as text that must be tokenised, as text that need not be, and as ids
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from benchmarks.report import STARTER, median, percentile, record, starter_folder
from penstock.memory.admission import ModelCapacity, RequestNeed, decide, owner_of
from penstock.memory.clients.requests import RequestPool
from penstock.memory.cost import GroupCost, KvCost
from penstock.memory.domains import RAM
from penstock.memory.eviction import ModelUsage
from penstock.memory.ledger import Ledger, Purpose
from penstock.server.pipeline.queue import Capacity, ModelQueue
from penstock.testing.served import Served, served

TOKENS = 110_000
QUEUED = 1_000
CALLS = 20_000
ROUNDS = 7


async def time_decide() -> None:
    """`decide` on a fresh snapshot each time, while the line and the pool are full."""
    ledger = Ledger({RAM: 64 << 30}, {RAM: 96 << 30}, {RAM: 1 << 28})
    for name in range(8):
        ledger.reserve(owner_of(str(name)), {(RAM, p): 1 << 28 for p in Purpose})
    pool = RequestPool(ledger, 1 << 28, 1 << 30, 600)
    queue = ModelQueue("m", max_requests=QUEUED, max_bytes=1 << 40, deadline_s=600)
    queue.capacity = lambda: Capacity(1, 1, 0)

    async def wait_in_line(number: int) -> None:
        with (
            pool.request_memory() as memory,
            queue.request(f"key {number % 50}", 0, 4000) as queued,
        ):
            await memory.grow(4000)
            async with queued.slot(1 << 20, 100):
                await asyncio.sleep(3600)

    crowd = [asyncio.ensure_future(wait_in_line(number)) for number in range(QUEUED)]
    await asyncio.sleep(0)
    capacity = ModelCapacity("m", RAM, 131_072, KvCost((GroupCost(1 << 21),), 16), 4 << 30, 1 << 30)
    usages = [
        ModelUsage(str(n), RAM, 1 << 30, 1 << 30, 0, 1 << 20, True, n == 0, float(n))
        for n in range(8)
    ]
    moving = ledger.reserve("moving", {(RAM, Purpose.REQUESTS): 1})
    times: list[float] = []
    for call in range(CALLS):
        moving.resize({(RAM, Purpose.REQUESTS): 1 + call % 2})
        need = RequestNeed(call % 200_000, 256)
        started = time.perf_counter()
        decide(need, ledger.snapshot(), capacity, usages)
        times.append((time.perf_counter() - started) * 1e6)
    assert queue.waiting >= QUEUED - 10
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    record(
        "decide",
        {
            "queued": QUEUED,
            "p50_us": round(median(times), 1),
            "p99_us": round(percentile(times, 0.99), 1),
        },
    )


def tokenising_s(server: Served) -> float:
    """Seconds spent on it since the start, by the server's own figures."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    found = re.findall(r"^penstock_tokenise_seconds_sum{.*} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def refuse(server: Served, body: bytes) -> float:
    """Seconds from the last byte sent to the last byte of the refusal."""
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0)) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}"
        sock.sendall(f"{head}\r\nconnection: close\r\n\r\n".encode() + body)
        sent = time.perf_counter()
        answer = b""
        while data := sock.recv(1 << 16):
            answer += data
        taken = time.perf_counter() - sent
    assert answer.startswith(b"HTTP/1.1 400"), answer[:200]
    assert b"context_length_exceeded" in answer
    return taken


def time_refusals() -> None:
    """Each kind of prompt, several times, one after the other."""
    home = starter_folder().parent.parent
    prompts: dict[str, object] = {
        "text": "The quick brown fox jumps over the lazy dog. " * (TOKENS // 10),
        "text far too long": "The quick brown fox jumps over the lazy dog. " * TOKENS,
        "ids": [5] * TOKENS,
    }
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with served(home, log, f"--model={STARTER}", "--memory=2GiB") as server:
            server.wait_until_ready()
            for name, prompt in prompts.items():
                body = json.dumps({"model": STARTER, "prompt": prompt}).encode()
                refuse(server, body)  # the first loads the tokenizer
                whole, rest = [], []
                for _ in range(ROUNDS):
                    before = tokenising_s(server)
                    taken = refuse(server, body)
                    whole.append(1e3 * taken)
                    rest.append(1e3 * (taken - (tokenising_s(server) - before)))
                record(
                    f"refusal {name}",
                    {
                        "body_bytes": len(body),
                        "median_ms": round(median(whole), 1),
                        "beside_tokenising_ms": round(median(rest), 1),
                        "worst_beside_tokenising_ms": round(max(rest), 1),
                    },
                )


if __name__ == "__main__":
    asyncio.run(time_decide())
    time_refusals()
