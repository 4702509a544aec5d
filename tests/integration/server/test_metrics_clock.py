"""`/metrics` of a running server: what Prometheus' own tool says of it, and a client's clock."""

from __future__ import annotations

import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.testing.fake_server import FakeServer, add_model, serving
from penstock.testing.fake_worker import FakeModel
from penstock.testing.system_tools import must_be_there

if TYPE_CHECKING:
    from collections.abc import Iterator

LOAD_S = 2.0
STEP_S = 0.05
TOKENS = 20
REQUESTS = 6
AGREEMENT = 0.02


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    home = tmp_path_factory.mktemp("home")
    add_model(home, "paced", FakeModel(step_s=STEP_S, load_s=LOAD_S))
    with serving(home, models_step_sequences=1) as running:
        yield running


def value(url: str, name: str, model: str = "paced") -> float:
    text = httpx.get(f"{url}/metrics").text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and sample.labels.get("model") == model
    )


def timed(client: httpx.Client) -> tuple[float, float]:
    """Seconds to the first token of a stream, and from that to the last."""
    body = {"model": "paced", "prompt": "hi", "max_tokens": TOKENS, "stream": True}
    begun = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as response:
        arrived = [
            time.perf_counter() for line in response.iter_lines() if line.startswith("data: {")
        ]
    assert len(arrived) >= TOKENS
    return arrived[0] - begun, arrived[TOKENS - 1] - arrived[0]


def test_histograms_of_tokens_agree_with_a_client_s_clock(server: FakeServer) -> None:
    """One answer at a time, so that those behind it wait for seconds."""
    first, between = "penstock_time_to_first_token_seconds", "penstock_time_between_tokens_seconds"
    names = (f"{first}_sum", f"{between}_sum", f"{first}_count", f"{between}_count")
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        ThreadPoolExecutor(REQUESTS) as pool,
    ):
        timed(client)  # the model is loaded
        before = [value(server.url, name) for name in names]
        measured = list(pool.map(timed, [client] * REQUESTS))
    firsts_s, betweens_s, firsts, betweens = (
        value(server.url, name) - was for name, was in zip(names, before, strict=True)
    )
    assert (firsts, betweens) == (REQUESTS, REQUESTS * (TOKENS - 1))
    assert firsts_s == pytest.approx(sum(took for took, _ in measured), rel=AGREEMENT)
    assert betweens_s == pytest.approx(sum(took for _, took in measured), rel=AGREEMENT)


def test_histograms_of_the_queue_and_of_loads_agree_with_it_too(server: FakeServer) -> None:
    """A request that finds its model absent waits in the line until it is loaded."""
    queue, load = "penstock_queue_wait_seconds", "penstock_load_seconds"
    names = (f"{queue}_sum", f"{load}_sum", f"{queue}_count", f"{load}_count")
    with httpx.Client(base_url=server.url, timeout=60) as client:
        client.post("/admin/api/models/paced/unload").raise_for_status()
        before = [value(server.url, name) for name in names]
        begun = time.perf_counter()
        client.post("/admin/api/models/paced/load").raise_for_status()
        loaded_s = time.perf_counter() - begun
        client.post("/admin/api/models/paced/unload").raise_for_status()
        waited_s = timed(client)[0] - STEP_S
    queues_s, loads_s, queues, loads = (
        value(server.url, name) - was for name, was in zip(names, before, strict=True)
    )
    assert (queues, loads) == (1, 2)
    assert queues_s == pytest.approx(waited_s, rel=AGREEMENT)
    assert loads_s == pytest.approx(loaded_s + waited_s, rel=AGREEMENT)


def test_what_is_held_lies_within_the_books(server: FakeServer) -> None:
    httpx.post(f"{server.url}/admin/api/models/paced/load", timeout=60).raise_for_status()

    def by_purpose(metric: str) -> dict[str, float]:
        text = httpx.get(f"{server.url}/metrics").text
        return {
            sample.labels["purpose"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == metric and sample.labels["domain"] == "ram"
        }

    held, booked = by_purpose("penstock_held_bytes"), by_purpose("penstock_booked_bytes")
    assert held["weights"] == booked["weights"] > 0
    assert all(size <= booked[purpose] for purpose, size in held.items())


def test_promtool_has_no_complaint(server: FakeServer) -> None:
    promtool = shutil.which("promtool")
    if promtool is None and not must_be_there():
        pytest.skip("promtool is not installed (Debian: prometheus)")
    assert promtool is not None, "promtool is missing (.ci/run installs it)"
    text = httpx.get(f"{server.url}/metrics").content
    command = [promtool, "check", "metrics"]
    checked = subprocess.run(command, input=text, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout.decode() + checked.stderr.decode()
