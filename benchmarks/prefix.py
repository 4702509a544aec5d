"""Time to the first token of a 1,500-token prompt: computed, found in the arena, found on disk.

    python -m benchmarks.prefix [--rounds 5]

Each round has a prompt of its own: once cold, once again at once (arena), and after a restart of
the server once more (disk; the first request to the new server is another one, so that the model
is loaded and warm). Then 24 prompts whose KV together is four times the arena, all at once,
against the same with room for all.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import STARTER, median, record, starter_folder
from benchmarks.serving import server

PROMPT = 1500
CROWD = 24
CROWD_PROMPT = 250
CROWD_NEW = 60


def prompt(salt: int, length: int) -> list[int]:
    """Token ids that begin like no other prompt's."""
    return [100 + (salt * 7919 + i * (salt + 3)) % 40_000 for i in range(length)]


def first_token_s(url: str, tokens: list[int]) -> float:
    """Seconds until an answer of one token is there."""
    body = {"model": STARTER, "prompt": tokens, "max_tokens": 1, "temperature": 0}
    # Making a client takes tens of milliseconds of its own.
    with httpx.Client(base_url=url, timeout=600) as client:
        client.get("/health")
        started = time.perf_counter()
        client.post("/v1/completions", json=body).raise_for_status()
        return time.perf_counter() - started


async def _crowd(url: str) -> tuple[list[str], float]:
    async with httpx.AsyncClient(base_url=url, timeout=900) as client:

        async def one(salt: int) -> str:
            body = {
                "model": STARTER,
                "prompt": prompt(salt, CROWD_PROMPT),
                "max_tokens": CROWD_NEW,
                "ignore_eos": True,
                "temperature": 0,
            }
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["text"])

        started = time.perf_counter()
        texts = await asyncio.gather(*(one(1000 + salt) for salt in range(CROWD)))
        return list(texts), time.perf_counter() - started


def crowd(**settings: Any) -> dict[str, Any]:
    """All at once; texts, seconds, and what the worker counted."""
    with server(**settings) as url:
        first_token_s(url, prompt(1, 30))
        texts, seconds = asyncio.run(_crowd(url))
        lines = httpx.get(f"{url}/metrics").text.splitlines()
    figures = {line.split("{")[0]: float(line.split()[-1]) for line in lines if "{model=" in line}
    return {"texts": texts, "seconds": seconds, **figures}


def main() -> None:
    """Measure, on a home of its own, so that nothing is found from before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    folder = starter_folder()
    profiles = folder.parent.parent / "profiles"
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "models").mkdir()
        (Path(home) / "models" / STARTER).symlink_to(folder)
        if profiles.exists():
            shutil.copytree(profiles, Path(home) / "profiles")
        os.environ["PENSTOCK_HOME"] = home
        with server() as url:
            first_token_s(url, prompt(1, PROMPT))
            cold, arena = [], []
            for salt in range(10, 10 + rounds):
                cold.append(first_token_s(url, prompt(salt, PROMPT)))
                arena.append(first_token_s(url, prompt(salt, PROMPT)))
        with server() as url:
            first_token_s(url, prompt(2, PROMPT))
            disk = [first_token_s(url, prompt(salt, PROMPT)) for salt in range(10, 10 + rounds)]
        roomy = crowd()
        shutil.rmtree(Path(home) / "cache")
        tight = crowd(kv_tokens=CROWD * (CROWD_PROMPT + CROWD_NEW) // 4)
    record(
        "prefix",
        {
            "cold_s": round(median(cold), 3),
            "arena_s": round(median(arena), 3),
            "disk_s": round(median(disk), 3),
            "arena_over_cold": round(median(arena) / median(cold), 3),
            "disk_over_cold": round(median(disk) / median(cold), 3),
            "crowd_equal": sum(a == b for a, b in zip(roomy["texts"], tight["texts"], strict=True)),
            "crowd_s": round(tight["seconds"], 1),
            "with_room_s": round(roomy["seconds"], 1),
            "preemptions": tight["penstock_preemptions_total"],
            "disk_hits": tight["penstock_kv_disk_hits_total"],
            "written_bytes": tight["penstock_kv_disk_written_bytes_total"],
        },
    )


if __name__ == "__main__":
    main()
