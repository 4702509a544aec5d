"""`penstock bench`: the engine against what the device can do, and a server under many clients.

`engine` loads a model in a process of its own, since this one never imports torch. `serve` sends
completions to a running server and times what comes back; its clients read bytes and look for
nothing but events, so that they are not what is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock import config
from penstock.catalog import Catalog, huggingface_cache
from penstock.cli.remote import RemoteError, connect, require_success
from penstock.cli.terminal import print_json
from penstock.server.processes.fork_server_client import WORKER_ENVIRONMENT

if TYPE_CHECKING:
    import argparse

    import httpx

_LETTERS = "abcdefghijklmnopqrstuvwxyz     "
_BUSY = "penstock_device_seconds_total"


def engine(options: argparse.Namespace) -> int:
    """Decode and prefill of one model, without a server."""
    settings = config.load(options.config)
    catalog = Catalog(settings.model_dirs, settings.models.hf_cache or huggingface_cache())
    card = catalog.make(options.model)
    command = [sys.executable, "-m", "penstock.worker.profiling.bench", str(card.path)]
    for flag in ("device", "dtype", "kv_dtype", "streams", "context", "new", "prefill", "memory"):
        value = getattr(options, flag)
        if value is not None:
            command += [f"--{flag.replace('_', '-')}", str(value)]
    return subprocess.run(command, check=False, env={**os.environ, **WORKER_ENVIRONMENT}).returncode


@dataclass(slots=True)
class Timed:
    """One request as its client saw it."""

    begun: float
    events: list[float] = field(default_factory=list)  # when each arrived

    @property
    def gaps(self) -> list[float]:
        """Between events."""
        return [later - earlier for earlier, later in pairwise(self.events)]


def serve(options: argparse.Namespace) -> int:
    """Many clients of a running server at once."""
    with connect(options) as client:
        model = options.model or _only_model(client)
        warm = min(options.clients, options.requests)
        asyncio.run(_load(client, model, options, "warm-up", range(warm)))
        busy, started = _busy_seconds(client), time.perf_counter()
        numbered = range(warm, warm + options.requests)
        timed = asyncio.run(_load(client, model, options, "measuring", numbered))
        seconds = time.perf_counter() - started
        computed = _busy_seconds(client) - busy
    tokens = options.requests * options.output
    firsts = sorted(one.events[0] - one.begun for one in timed)
    gaps = sorted(gap for one in timed for gap in one.gaps) or [0.0]
    print_json(
        {
            "model": model,
            "clients": options.clients,
            "requests": options.requests,
            "input_tokens": options.input,
            "output_tokens": options.output,
            "seconds": round(seconds, 2),
            "output_tokens_per_s": round(tokens / seconds, 1),
            "first_token_ms": _spread(firsts),
            "between_tokens_ms": _spread(gaps),
            "device_idle_share": round(max(0.0, 1 - computed / seconds), 3),
        }
    )
    return 0


def _spread(ordered: list[float]) -> dict[str, float]:
    places = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    figures = {
        name: round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)
        for name, share in places.items()
    }
    return figures | {"mean": round(1e3 * statistics.fmean(ordered), 2)}


def _only_model(client: httpx.Client) -> str:
    response = client.get("/v1/models")
    require_success(response)
    names: list[str] = [entry["id"] for entry in response.json()["data"]]
    if len(names) != 1:
        raise RemoteError(f"The server has {len(names)} models: name one with --model.")
    return names[0]


def _busy_seconds(client: httpx.Client) -> float:
    """Seconds that devices have computed since the server's start."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(_BUSY))


async def _load(
    client: httpx.Client, model: str, options: argparse.Namespace, phase: str, numbered: range
) -> list[Timed]:
    """Completions of the prompts with these numbers, at most `clients` at a time."""
    # Always other numbers on a fresh server: KV of a prompt that was there before is found again.
    numbers = iter(numbered)
    timed: list[Timed] = []
    key = client.headers.get("authorization")

    async def one_client() -> None:
        for number in numbers:
            body = json.dumps(
                {
                    "model": model,
                    "prompt": _prompt(options.input, number),
                    "max_tokens": options.output,
                    "temperature": options.temperature,
                    "seed": number,
                    "stream": True,
                    "ignore_eos": True,
                }
            )
            timed.append(await _complete(str(client.base_url), key, body))
            if options.progress:
                sys.stderr.write(f"progress {phase} {len(timed)} {len(numbered)}\n")
                sys.stderr.flush()

    await asyncio.gather(*(one_client() for _ in range(min(options.clients, len(numbered)))))
    return timed


def _prompt(tokens: int, seed: int) -> str:
    """Text of about so many tokens; of exactly so many where a byte is one, as in `random:`."""
    # Not the beginning of a longer one either, whose KV may be there.
    return "".join(random.Random(f"{tokens} {seed}").choices(_LETTERS, k=tokens))


async def _complete(url: str, key: str | None, body: str) -> Timed:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    head = ["POST /v1/completions HTTP/1.1", f"host: {parts.netloc}", "connection: close"]
    head += ["content-type: application/json", f"content-length: {len(body)}"]
    head += [f"authorization: {key}"] if key else []
    timed = Timed(time.perf_counter())
    writer.write(("\r\n".join(head) + "\r\n\r\n" + body).encode())
    status = await reader.readline()
    if b" 200 " not in status:
        answer = (await reader.read()).decode(errors="replace")
        raise RemoteError(f"The server answered {status.decode().strip()}: {answer[-300:]}")
    while data := await reader.read(65536):
        now = time.perf_counter()
        timed.events += [now] * data.count(b"data: {")
        if b'"error"' in data:
            raise RemoteError(f"A stream ended in an error: {data[-300:].decode()}")
    writer.close()
    if not timed.events:
        raise RemoteError("A stream ended without a token.")
    return timed
