"""Another program in the same control group eats memory in steps, then lets go.

Penstock sheds in its documented order, goes on with what it can do, refuses the rest truthfully,
and is back in full service by itself.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock import shapes
from penstock.testing import tiny
from penstock.testing.cage import Cage, NoCage
from penstock.testing.neighbour import neighbour
from penstock.testing.served import Served, served

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
CAGE = 3072 * MIB  # of which `auto` leaves a third to others
STEP = 64 * MIB
MAX_HELD_BYTES = 2240 * MIB  # or until only the busy model is left
BUSY, IDLE = "busy", "tiny-llama"
# A MiB of KV a token: much memory for little computing.
MODEL = {
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 256,
    "max_position_embeddings": 4096,
    "vocab_size": 512,
}
SMALL = [5] * 30
LARGE = [5] * 700  # fits in full service, and not in what the neighbour leaves
ACTS = ["caches", "unused kv", "idle models", "kv in use"]
BACK_S = 15.0


@dataclass
class Traffic:
    """Clients with small requests, one after another, all the time."""

    url: str
    answers: list[tuple[float, int]] = field(default_factory=list)  # when, and the status
    faults: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def client(self) -> None:
        with httpx.Client(base_url=self.url, timeout=120) as client:
            while not self.over.is_set():
                answer = complete(client, BUSY, SMALL)
                self.answers.append((time.monotonic(), answer.status_code))
                if answer.status_code not in (200, 503):
                    self.faults.append(answer.text)

    def served(self, since: float, until: float) -> int:
        return sum(status == 200 and since <= at <= until for at, status in self.answers)


def complete(client: httpx.Client, model: str, prompt: list[int], **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **fields}
    return client.post("/v1/completions", json=body)


def sheds(server: Served) -> list[dict[str, Any]]:
    return [row for row in server.get("/admin/api/events") if row["event"] == "shed"]


def squeeze(server: Served, cage: Cage, traffic: Traffic) -> tuple[float, float]:
    """Returns when little was left, and when the neighbour let go."""
    with neighbour(cage) as other:
        while other.held_bytes < MAX_HELD_BYTES and not any(
            e["act"] == "idle models" for e in sheds(server)
        ):
            other.take(STEP)
            time.sleep(0.25)
        tight = time.monotonic()
        external = server.get("/admin/api/memory")["domains"]["ram"]["external_bytes"]
        assert external > other.held_bytes * 0.9
        with httpx.Client(base_url=server.url, timeout=120) as client:
            refused = complete(client, BUSY, LARGE)
            assert refused.status_code == 503, refused.text
            assert refused.json()["error"]["code"] == "overloaded"
            assert int(refused.headers["retry-after"]) >= 1
        other.let_go()
        return tight, time.monotonic()


def test_a_neighbour_that_eats_memory_and_lets_go(tmp_path: Path) -> None:
    for name in (BUSY, IDLE):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        shapes.write_folder("random:tiny-llama", folder)
    (tmp_path / "models" / BUSY / "penstock.json").unlink()
    tiny.save("llama", tmp_path / "models" / BUSY, **MODEL)
    settings = {
        "PENSTOCK_SERVER_QUEUE_DEADLINE_S": "4",
        "PENSTOCK_MODELS_STEP_TOKENS": "64",  # small steps are quickly measured
        "PENSTOCK_MODELS_STEP_SEQUENCES": "8",
    }
    try:
        cage = Cage(CAGE)
    except NoCage as reason:
        pytest.skip(f"no control group to run in: {reason}")
    log = tmp_path / "serve.log"
    with cage, served(tmp_path, log, f"--model={BUSY}", cage=cage, environment=settings) as server:
        server.wait_until_ready()
        with httpx.Client(base_url=server.url, timeout=120) as client:
            patience = time.monotonic() + 120  # a load may take longer than a request waits
            while (answer := complete(client, IDLE, SMALL)).status_code == 503:
                assert time.monotonic() < patience, answer.text
            assert answer.status_code == 200, answer.text
            assert complete(client, BUSY, LARGE).status_code == 200
        worker, full = server.row(BUSY)["pid"], server.row(BUSY)["kv_tokens"]
        traffic = Traffic(server.url)
        threads = [threading.Thread(target=traffic.client) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            tight, freed = squeeze(server, cage, traffic)
            while server.row(BUSY)["kv_tokens"] < 0.9 * full:
                assert time.monotonic() < freed + BACK_S, server.get("/admin/api/memory")
                time.sleep(0.1)
            back_s = time.monotonic() - freed
        finally:
            traffic.over.set()
            for thread in threads:
                thread.join()
        with httpx.Client(base_url=server.url, timeout=120) as client:
            for model, prompt in ((BUSY, LARGE), (IDLE, SMALL)):
                answer = complete(client, model, prompt)
                assert answer.status_code == 200, answer.text
        acts = [row["act"] for row in sheds(server)]
        print(f"back after {back_s:.1f} s; {acts}")  # noqa: T201 - for docs/proof.md
        assert not traffic.faults
        assert traffic.served(tight, freed), "nothing was served while memory was short"
        # Caches come first in every turn, but only those that have grown again since the last.
        first = list(dict.fromkeys(act for act in acts if act != "caches"))
        assert first == [act for act in ACTS[1:] if act in acts], acts
        assert {"unused kv", "idle models"} <= set(acts)
        assert server.row(BUSY)["pid"] == worker
        assert cage.kills() == 0
