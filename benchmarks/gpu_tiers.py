"""A long prefix on a GPU: computed, found in RAM, found on disk; and when which one pays.

    python -m benchmarks.gpu_tiers [--length 32000] [--memory 24GiB]

So little memory that the arena holds hardly more than one such prefix. Each length is computed
once, then others push it out of the arena, and it is asked for again: it comes from RAM. The rate
of a pinned copy is measured before, with nothing else on the card. After a restart without RAM for
KV the longest comes from the disk, and the next shows what was learned from that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from benchmarks.report import median, record
from benchmarks.serving import wait_until_ready

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "random:qwen3-8b"
PORT = 8013
ROUNDS = 2  # more would push each other out of RAM before they are asked for again
_PINNED = """
import time, torch
host = torch.empty(4 << 30, dtype=torch.uint8, pin_memory=True)
device = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
times = []
for _ in range(6):
    torch.cuda.synchronize()
    started = time.perf_counter()
    device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    times.append(time.perf_counter() - started)
print((4 << 30) / sorted(times)[2])
"""


@contextlib.contextmanager
def _server(home: Path, memory: str, **settings: str) -> Iterator[httpx.Client]:
    command = [sys.executable, "-m", "penstock", "serve", "--model", MODEL, "--device", "cuda"]
    command += ["--port", str(PORT)]
    own = {"PENSTOCK_HOME": str(home), "PENSTOCK_MEMORY_GPU_LIMIT": memory, **settings}
    log = (home / "server.log").open("ab")
    process = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{PORT}"
    try:
        wait_until_ready(url, process)
        with httpx.Client(base_url=url, timeout=300) as client:
            yield client
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def prompt(salt: int, length: int) -> list[int]:
    """Token ids that begin like no other prompt's."""
    return random.Random(salt).choices(range(100, 100_000), k=length)


def first_token(client: httpx.Client, tokens: list[int]) -> tuple[float, int]:
    """Seconds until an answer of one token is there, and the prompt tokens that were found."""
    body = {"model": MODEL, "prompt": tokens, "max_tokens": 1, "temperature": 0}
    content = json.dumps(body)
    started = time.perf_counter()
    answer = client.post("/v1/completions", content=content)
    took = time.perf_counter() - started
    answer.raise_for_status()
    return took, int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def figures(client: httpx.Client) -> dict[str, float]:
    """What the worker counts of its tiers."""
    lines = client.get("/metrics").text.splitlines()
    told = {line.split("{")[0]: float(line.split()[-1]) for line in lines if "{model=" in line}
    return {name: value for name, value in told.items() if name.startswith("penstock_kv_")}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=32_000)
    parser.add_argument("--memory", default="24GiB")
    options = parser.parse_args()
    done = subprocess.run([sys.executable, "-c", _PINNED], capture_output=True, check=True)
    pinned = float(done.stdout)
    lengths = [options.length // 32, options.length // 8, options.length // 2, options.length]
    cold: dict[int, list[float]] = {length: [] for length in lengths}
    ram: dict[int, list[float]] = {length: [] for length in lengths}
    found: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        # The disk is left out, so that nothing else is on its way.
        with _server(home, options.memory, PENSTOCK_CACHE_SIZE="0") as client:
            first_token(client, prompt(1, options.length))  # everything once
            for salt in range(ROUNDS):
                for length in lengths:
                    cold[length].append(first_token(client, prompt(100 * salt + length, length))[0])
            # Out of the arena with them.
            first_token(client, prompt(7, options.length))
            first_token(client, prompt(50, options.length // 4))
            before = figures(client)
            for salt in range(ROUNDS):
                for length in lengths:
                    took, hit = first_token(client, prompt(100 * salt + length, length))
                    ram[length].append(took)
                    found[length] = hit
            after = figures(client)
        restored = {name: after[name] - before.get(name, 0.0) for name in after}
        assert restored["penstock_kv_ram_hits_total"], f"nothing came from RAM: {after}"
        rate = restored["penstock_kv_onloaded_bytes_total"]
        rate /= restored["penstock_kv_onload_seconds_sum"]
        token_bytes = restored["penstock_kv_onloaded_bytes_total"] / (ROUNDS * sum(found.values()))
        record(
            "gpu_tiers ram",
            {
                "pinned_gb_per_s": round(pinned / 1e9, 1),
                "restored_gb_per_s": round(rate / 1e9, 1),
                "copied_gb_per_s": round(after["penstock_kv_ram_bytes_per_second"] / 1e9, 1),
                "restored_over_pinned": round(rate / pinned, 3),
                "lengths": {
                    length: {
                        "computed_s": round(median(cold[length]), 4),
                        "ram_s": round(median(ram[length]), 4),
                        "found": found[length],
                        "ram_over_computed": round(median(ram[length]) / median(cold[length]), 3),
                        "rate_to_pay_gb_per_s": round(
                            found[length] * token_bytes / median(cold[length]) / 1e9, 2
                        ),
                    }
                    for length in lengths
                },
            },
        )
        _disk(home, options.length, options.memory)


def _disk(home: Path, length: int, memory: str) -> None:
    """What the disk gives, and what is made of that."""
    settings = {"PENSTOCK_CACHE_SIZE": "20GiB"}
    with _server(home, memory, **settings) as client:
        cold = [first_token(client, prompt(salt, length))[0] for salt in (900, 901)]
        first_token(client, prompt(902, length // 4))
        time.sleep(8)  # for the writer
        written = figures(client)
    with _server(home, memory, PENSTOCK_CACHE_RAM="0", **settings) as client:
        first_token(client, prompt(3, 1000))
        first = first_token(client, prompt(901, length))
        learned = figures(client)
        again = first_token(client, prompt(902, length // 4))
    record(
        "gpu_tiers disk",
        {
            "computed_s": round(cold[1], 3),
            "written_gb": round(written["penstock_kv_disk_written_bytes_total"] / 1e9, 2),
            "write_gb_per_s": round(written["penstock_kv_disk_write_bytes_per_second"] / 1e9, 2),
            "first_token_s": round(first[0], 3),
            "found": first[1],
            "read_gb_per_s_of_a_thread": round(
                learned["penstock_kv_disk_read_bytes_per_second"] / 1e9, 2
            ),
            "restored_gb_per_s": round(
                learned["penstock_kv_onloaded_bytes_total"]
                / max(learned["penstock_kv_onload_seconds_sum"], 1e-9)
                / 1e9,
                2,
            ),
            "the_next": {"first_token_s": round(again[0], 3), "found": again[1]},
        },
    )


if __name__ == "__main__":
    main()
