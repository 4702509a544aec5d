"""From a request to an absent model until its first token, against transformers.

    python -m benchmarks.loading [--rounds 5]

One server that runs on; before each request the model is unloaded. Its profile is stored and its
files are in the page cache. In every round transformers does the same: a process of its own from
its start to the first token (`fresh`), and, measured inside such a process, `from_pretrained` and
the first token once everything is imported (`inside`). All see the same prompt.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.report import STARTER, median, record, starter_folder
from penstock.testing.served import Served, served

PROMPT = list(range(100, 125))

PEER = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM
import transformers.models.llama.modeling_llama
begun = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
loaded = time.perf_counter()
ids = torch.tensor([json.loads(sys.argv[2])])
with torch.inference_mode():
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
print(json.dumps([loaded - begun, time.perf_counter() - loaded]))
"""


def ours(server: Served, client: httpx.Client) -> tuple[float, dict[str, float]]:
    """Seconds to the first token of an absent model, and the phases of its load."""
    client.post(f"/admin/api/models/{STARTER}/unload").raise_for_status()
    body = {"model": STARTER, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    started = time.perf_counter()
    client.post("/v1/completions", json=body).raise_for_status()
    whole = time.perf_counter() - started
    loaded = [row for row in server.get("/admin/api/events") if row["event"] == "loaded"][-1]
    # What is left is the server's: reading the request, booking, a fork, and the first step.
    return whole, {**loaded["phases"], "beside": whole - loaded["load_s"]}


def peer(folder: Path) -> tuple[float, float, float]:
    """The whole process, `from_pretrained` and the first token inside it, in seconds."""
    started = time.perf_counter()
    command = [sys.executable, "-c", PEER, str(folder), json.dumps(PROMPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    load_s, token_s = json.loads(done.stdout.splitlines()[-1])
    return time.perf_counter() - started, load_s, token_s


def main() -> None:
    """Alternate, and compare the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    folder = starter_folder()
    whole: list[float] = []
    phases: list[dict[str, float]] = []
    fresh: list[float] = []
    load: list[float] = []
    token: list[float] = []
    with (
        tempfile.TemporaryDirectory() as temporary,
        served(folder.parent.parent, Path(temporary) / "serve.log", "--memory=4GiB") as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        for _ in range(2):  # a profile that is proven, a page cache that is warm
            ours(server, client)
        peer(folder)
        for _ in range(rounds):
            seconds, parts = ours(server, client)
            whole.append(seconds)
            phases.append(parts)
            for values, value in zip((fresh, load, token), peer(folder), strict=True):
                values.append(value)
    inside = [a + b for a, b in zip(load, token, strict=True)]
    record(
        "loading",
        {
            "first_token_s": round(median(whole), 3),
            "over_fresh": round(median(whole) / median(fresh), 3),
            "over_inside": round(median(whole) / median(inside), 3),
            "phases": {name: round(median([p[name] for p in phases]), 3) for name in phases[0]},
            "all_s": [round(value, 3) for value in whole],
            "fresh_s": round(median(fresh), 3),
            "inside_s": round(median(inside), 3),
            "from_pretrained_s": round(median(load), 3),
        },
    )


if __name__ == "__main__":
    main()
