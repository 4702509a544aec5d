"""Prometheus metrics: what requests cost, and each worker's own figures.

Counters are moved by the endpoints; a worker's figures are read from its latest `Status` at the
time of a scrape, so a scrape asks no worker anything.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client import Metric

    from penstock.memory.governor import Governor
    from penstock.memory.ledger import Ledger
    from penstock.server.api.exchange import Exchange
    from penstock.server.api.generation import Generation, Origin
    from penstock.wire import Status

_WAIT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The counters of one server; `statuses` gives the latest figures of each loaded model."""

    def __init__(
        self, statuses: Callable[[], Mapping[str, Status]], ledger: Ledger, governor: Governor
    ) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self._requests = Counter(
            "penstock_requests", "Answers by route and status.", ["route", "status"],
            registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "penstock_request_seconds", "From the request's head to the answer's end.", ["route"],
            buckets=_WAIT_BUCKETS, registry=registry,
        )  # fmt: skip
        self._prompt_tokens = Counter(
            "penstock_prompt_tokens", "Tokens of prompts taken in.", ["model"], registry=registry
        )
        self._completion_tokens = Counter(
            "penstock_completion_tokens", "Tokens generated.", ["model"], registry=registry
        )
        self._tokenising = Histogram(
            "penstock_tokenise_seconds", "From a prompt's text to its tokens.", ["model"],
            buckets=_WAIT_BUCKETS, registry=registry,
        )  # fmt: skip
        self._first_token = Histogram(
            "penstock_time_to_first_token_seconds", "From the request's head to a first token.",
            ["model"], buckets=_WAIT_BUCKETS, registry=registry,
        )  # fmt: skip
        self._between_tokens = Histogram(
            "penstock_time_between_tokens_seconds", "Between two tokens of one answer.",
            ["model"], buckets=_TOKEN_BUCKETS, registry=registry,
        )  # fmt: skip
        registry.register(_Workers(statuses))
        registry.register(_Memory(ledger, governor))

    def tokenised(self, model: str, seconds: float) -> None:
        """A prompt's text has become tokens."""
        self._tokenising.labels(model).observe(seconds)

    def tokens_out(self, model: str, tokens: int, since_last_s: float | None) -> None:
        """A step gave one answer that many tokens, so long after its last one."""
        self._completion_tokens.labels(model).inc(tokens)
        if since_last_s is not None:
            self._between_tokens.labels(model).observe(since_last_s / tokens)

    @contextmanager
    def observe(self, origin: Origin, generation: Generation, model: str) -> Iterator[None]:
        """Count a generation when it is over, however it ends, and note it for the access log."""
        self._prompt_tokens.labels(model).inc(generation.usage.prompt_tokens)
        try:
            yield
        finally:
            submitted, first = generation.submitted, generation.first_token
            if first is not None:
                self._first_token.labels(model).observe(first - origin.started)
            origin.record.update(
                model=model,
                prompt_tokens=generation.usage.prompt_tokens,
                completion_tokens=generation.usage.completion_tokens,
                queue_ms=None if submitted is None else _ms(submitted - origin.started),
                ttft_ms=None if first is None else _ms(first - origin.started),
            )

    def answered(self, route: str, exchange: Exchange) -> None:
        """An exchange is over."""
        status = "gone" if exchange.status is None else str(exchange.status)
        self._requests.labels(route, status).inc()
        self._seconds.labels(route).observe(time.monotonic() - exchange.started)

    def render(self) -> bytes:
        """The text of `/metrics`."""
        return generate_latest(self._registry)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


# (field of `Status`, metric, what it is).
_GAUGES = (
    ("running", "penstock_running", "Requests in the batch."),
    ("waiting", "penstock_waiting", "Requests that wait for the batch."),
    ("blocks_total", "penstock_kv_blocks", "KV blocks that there are."),
    ("blocks_free", "penstock_kv_blocks_free", "KV blocks that are free."),
    (
        "blocks_kept",
        "penstock_kv_blocks_kept",
        "Free KV blocks whose tokens are known, so that a prompt that begins with them is spared.",
    ),
    ("block_tokens", "penstock_kv_block_tokens", "Tokens in a KV block."),
    ("step_s", "penstock_step_seconds", "Duration of the latest step."),
    ("host_s", "penstock_step_host_seconds", "The part of it without work for the device."),
    ("step_tokens", "penstock_step_tokens", "Tokens computed in the latest step."),
    (
        "predicted_bytes",
        "penstock_step_predicted_bytes",
        "The largest prediction of a step since allocators' caches were last dropped.",
    ),
    ("measured_bytes", "penstock_step_measured_bytes", "The most that steps held since then."),
    ("kv_committed_bytes", "penstock_kv_committed_bytes", "Memory behind the KV arena."),
    ("private_bytes", "penstock_worker_private_bytes", "The worker's private memory."),
)
_COUNTERS = (
    ("prompt_tokens", "penstock_kv_prompt_tokens", "Prompt tokens of requests that have begun."),
    ("reused_tokens", "penstock_kv_reused_tokens", "Of those, found in the KV cache."),
    ("evictions", "penstock_kv_evictions", "Known KV blocks that were given up for others."),
    ("steps", "penstock_steps", "Steps since the model was loaded."),
    ("preemptions", "penstock_preemptions", "Requests put back since the model was loaded."),
    ("exhausted", "penstock_steps_exhausted", "Steps that ran out of memory and were taken back."),
    ("surprises", "penstock_step_surprises", "Times that steps held more than was predicted."),
    ("device_s", "penstock_device_seconds", "Time in which the device computed."),
)


# (name in `Status.tier`, metric, what it is).
_TIER_GAUGES = (
    ("ram_bytes", "penstock_kv_ram_bytes", "KV kept in RAM that nobody is using."),
    ("ram_held_bytes", "penstock_kv_ram_held_bytes", "RAM that a GPU model's KV has taken."),
    ("ram_limit_bytes", "penstock_kv_ram_limit_bytes", "What it may come to."),
    ("ram_bytes_per_s", "penstock_kv_ram_bytes_per_second", "Rate of copies to the device."),
    ("files", "penstock_kv_disk_files", "Files of the model in the cache directory."),
    ("bytes", "penstock_kv_disk_model_bytes", "Their bytes."),
    ("held_bytes", "penstock_kv_disk_bytes", "Bytes in the cache directory, over all models."),
    ("quota_bytes", "penstock_kv_disk_quota_bytes", "What they may come to."),
    ("queued_bytes", "penstock_kv_disk_queued_bytes", "Bytes that wait to be written."),
    ("failing", "penstock_kv_disk_failing", "1 while the disk cannot be written to."),
    ("read_bytes_per_s", "penstock_kv_disk_read_bytes_per_second", "Rate of reading, lately."),
    ("write_bytes_per_s", "penstock_kv_disk_write_bytes_per_second", "Rate of writing, lately."),
)
_TIER_COUNTERS = (
    ("ram_hits", "penstock_kv_ram_hits", "Blocks that were found in RAM."),
    ("ram_evictions", "penstock_kv_ram_evictions", "Blocks in RAM that were given up for others."),
    ("restored_bytes", "penstock_kv_restored_bytes", "KV that was brought back to requests."),
    ("restored_s", "penstock_kv_restored_seconds", "Time that they waited for it."),
    ("overtaken", "penstock_kv_disk_overtaken", "Blocks that came too fast for the disk."),
    ("hits", "penstock_kv_disk_hits", "Blocks that were read from the disk."),
    ("misses", "penstock_kv_disk_misses", "Blocks that were asked for and could not be read."),
    ("bad_removed", "penstock_kv_disk_bad_files", "Files that were damaged and were removed."),
    ("loaded_bytes", "penstock_kv_disk_read_bytes", "Bytes of KV that were read."),
    ("accepted", "penstock_kv_disk_accepted", "Blocks that were taken for writing."),
    ("saved", "penstock_kv_disk_saved", "Of those, written."),
    ("saved_bytes", "penstock_kv_disk_written_bytes", "Bytes of files that were written."),
    ("failed", "penstock_kv_disk_failed", "Of those taken, failed for the disk."),
    ("refused", "penstock_kv_disk_refused", "Blocks that were not taken while the disk failed."),
    ("evictions", "penstock_kv_disk_evictions", "Files that were removed for others."),
)


class _Workers(Collector):
    """The workers' figures, read when scraped."""

    def __init__(self, statuses: Callable[[], Mapping[str, Status]]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterable[Metric]:
        """Every figure of every loaded model."""
        statuses = self._statuses()
        own = {model: msgspec.structs.asdict(status) for model, status in statuses.items()}
        tiers = {model: status.tier for model, status in statuses.items()}
        yield from _families(GaugeMetricFamily, _GAUGES, own)
        yield from _families(CounterMetricFamily, _COUNTERS, own)
        yield from _families(GaugeMetricFamily, _TIER_GAUGES, tiers)
        yield from _families(CounterMetricFamily, _TIER_COUNTERS, tiers)


def _families(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    table: Iterable[tuple[str, str, str]],
    figures: Mapping[str, Mapping[str, Any]],
) -> Iterable[Metric]:
    for name, metric, about in table:
        family = kind(metric, about, labels=["model"])
        for model, values in figures.items():
            if name in values:
                family.add_metric([model], values[name])
        yield family


class _Memory(Collector):
    """The books, from the latest snapshot, and what the governor counted."""

    def __init__(self, ledger: Ledger, governor: Governor) -> None:
        self._ledger = ledger
        self._governor = governor

    def collect(self) -> Iterable[Metric]:
        """Bytes by domain and purpose, the bounds, and the events by kind."""
        booked = GaugeMetricFamily(
            "penstock_booked_bytes", "Bytes in the books.", labels=["domain", "purpose"]
        )
        bounds = GaugeMetricFamily(
            "penstock_memory_bytes",
            "The bounds of a domain, and what is free of it.",
            labels=["domain", "what"],
        )
        for domain, state in self._ledger.snapshot().items():
            for purpose, size in state.purposes().items():
                booked.add_metric([domain, purpose.value], size)
            for what in ("limit", "capacity", "spare", "external", "free"):
                bounds.add_metric([domain, what], getattr(state, f"{what}_bytes"))
        events = CounterMetricFamily(
            "penstock_memory_events", "What the governor did and noticed.", labels=["event"]
        )
        for kind, count in self._governor.events.counts.items():
            events.add_metric([kind], count)
        drift = GaugeMetricFamily(
            "penstock_memory_drift_bytes",
            "By how much a process was read to be over its books; negative: under them.",
            labels=["owner"],
        )
        for owner, size in self._governor.events.drift.items():
            drift.add_metric([owner], size)
        yield from (booked, bounds, events, drift)
