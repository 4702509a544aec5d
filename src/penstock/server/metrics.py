"""Prometheus metrics: what requests cost, and each worker's own figures.

Counters are moved by the endpoints; a worker's figures are read from its latest `Status` at the
time of a scrape, so a scrape asks no worker anything.
"""

from __future__ import annotations

from collections import Counter as Counts
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock import __version__
from penstock.server.observe.readings import own_bytes_by_owner
from penstock.tiers.rates import DURATIONS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client import Metric

    from penstock.memory.governor import Governor
    from penstock.memory.ledger import Key, Ledger
    from penstock.wire import Status

_WAIT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# (name in `Metrics`, metric, what it is, label, buckets).
_HISTOGRAMS = (
    ("seconds", "penstock_request_seconds", "From the request's head to the answer's end.",
     "route", _WAIT_BUCKETS),
    ("tokenising", "penstock_tokenise_seconds", "From a prompt's text to its tokens.",
     "model", _WAIT_BUCKETS),
    ("queue", "penstock_queue_wait_seconds",
     "In a model's line, from joining it to a place with the worker; loads included.",
     "model", _WAIT_BUCKETS),
    ("first_token", "penstock_time_to_first_token_seconds",
     "From the request's head to a first token.", "model", _WAIT_BUCKETS),
    ("between_tokens", "penstock_time_between_tokens_seconds",
     "Between two tokens of one answer.", "model", _TOKEN_BUCKETS),
    ("load", "penstock_load_seconds", "From a worker's start to a model that answers.",
     "model", _WAIT_BUCKETS),
)  # fmt: skip


class Metrics:
    """The counters of one server; `statuses` gives the latest figures of each loaded model."""

    def __init__(
        self,
        statuses: Callable[[], Mapping[str, Status]],
        ledger: Ledger,
        governor: Governor,
        refusals: Mapping[tuple[str, str], int],
        held: Callable[[], Mapping[Key, int]],
    ) -> None:
        self._registry = registry = CollectorRegistry()
        # What moves with every token is a plain count, and a child that is looked up once.
        self.generated: Counts[str] = Counts()  # tokens by model
        self._between_tokens: dict[str, Histogram] = {}

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, labels, registry=registry)

        self._requests = counter(
            "penstock_requests", "Answers by route and status.", "route", "status"
        )
        self._prompt_tokens = counter(
            "penstock_prompt_tokens", "Tokens of prompts taken in.", "model"
        )
        self._sheds = counter(
            "penstock_sheds", "What was given up because a domain was short.", "domain", "act"
        )
        self._restarts = counter(
            "penstock_worker_restarts", "Loads after a worker's death.", "model"
        )
        self._times = {
            key: Histogram(name, about, [label], buckets=buckets, registry=registry)
            for key, name, about, label, buckets in _HISTOGRAMS
        }
        Gauge(
            "penstock_build_info", "1, with the version as its label.", ["version"],
            registry=registry,
        ).labels(__version__).set(1)  # fmt: skip
        registry.register(_Workers(statuses))
        registry.register(_Memory(ledger, governor, held))
        registry.register(
            _Counted("penstock_refusals", "Requests refused.", ("code", "reason"), refusals)
        )
        registry.register(
            _Counted("penstock_completion_tokens", "Tokens generated.", ("model",), self.generated)
        )
        governor.events.listeners.append(self._hear)

    def tokenised(self, model: str, seconds: float) -> None:
        """A prompt's text has become tokens."""
        self._times["tokenising"].labels(model).observe(seconds)

    def queued(self, model: str, seconds: float) -> None:
        """An answer has a place with the worker, so long after its request joined the line."""
        self._times["queue"].labels(model).observe(seconds)

    def loaded(self, model: str, seconds: float) -> None:
        """A model answers, so long after its worker's start."""
        self._times["load"].labels(model).observe(seconds)

    def tokens_out(self, model: str, tokens: int, since_last_s: float | None) -> None:
        """A step gave one answer that many tokens, so long after its last one."""
        self.generated[model] += tokens
        if since_last_s is not None:
            if (times := self._between_tokens.get(model)) is None:
                times = self._times["between_tokens"].labels(model)
                self._between_tokens[model] = times
            # One, unless drafts were right or the event loop was late.
            for _ in range(tokens):
                times.observe(since_last_s / tokens)

    def prompt(self, model: str, tokens: int) -> None:
        """A prompt was taken in."""
        self._prompt_tokens.labels(model).inc(tokens)

    def first_token(self, model: str, seconds: float) -> None:
        """An answer has begun, so long after the request's head."""
        self._times["first_token"].labels(model).observe(seconds)

    def answered(self, route: str, status: int | None, seconds: float) -> None:
        """A request is over; without a status its client has left before."""
        self._requests.labels(route, "gone" if status is None else str(status)).inc()
        self._times["seconds"].labels(route).observe(seconds)

    def render(self) -> bytes:
        """The text of `/metrics`."""
        return generate_latest(self._registry)

    def _hear(self, row: Mapping[str, object]) -> None:
        """Of events those that are counted by more than their kind."""
        if row["event"] == "shed":
            self._sheds.labels(str(row["domain"]), str(row["act"])).inc()
        elif row["event"] == "restart":
            self._restarts.labels(str(row["model"])).inc()


# (field of `Status`, metric, what it is).
_GAUGES = (
    ("running", "penstock_running", "Requests in the batch."),
    ("waiting", "penstock_waiting", "Requests that wait for the batch."),
    ("kv_capacity_bytes", "penstock_kv_capacity_bytes", "KV that requests can hold at once."),
    ("kv_free_bytes", "penstock_kv_free_bytes", "KV that is free."),
    (
        "kv_evictable_bytes",
        "penstock_kv_evictable_bytes",
        "Free KV whose tokens are known, so that a prompt that begins with them is spared.",
    ),
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
    ("evictions", "penstock_kv_evictions", "Known KV blocks that were evicted."),
    ("steps", "penstock_steps", "Steps since the model was loaded."),
    ("preemptions", "penstock_preemptions", "Requests put back since the model was loaded."),
    ("oom_steps", "penstock_oom_steps", "Steps that ran out of memory and were taken back."),
    (
        "underpredicted_steps",
        "penstock_underpredicted_steps",
        "Times that steps held more than was predicted.",
    ),
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
    ("onloaded_bytes", "penstock_kv_onloaded_bytes", "KV that was brought back to requests."),
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
        yield _onloads(tiers)
        yield from _drafts(statuses)


def _drafts(statuses: Mapping[str, Status]) -> Iterable[Metric]:
    """What became of guessed tokens."""
    labels = ["model", "proposer"]
    verified = CounterMetricFamily(
        "penstock_drafts_verified", "Guessed tokens that steps have verified.", labels=labels
    )
    accepted = CounterMetricFamily(
        "penstock_drafts_accepted", "Of those, right: tokens that took no step.", labels=labels
    )
    for model, status in statuses.items():
        for proposer, (tried, right) in status.drafts.items():
            verified.add_metric([model, proposer], tried)
            accepted.add_metric([model, proposer], right)
    yield from (verified, accepted)


def _onloads(tiers: Mapping[str, Mapping[str, float]]) -> Metric:
    """How long requests waited for KV from RAM or disk; workers count by buckets."""
    family = HistogramMetricFamily(
        "penstock_kv_onload_seconds",
        "From a request for KV in RAM or on disk to its last block.",
        labels=["model"],
    )
    for model, figures in tiers.items():
        buckets, count = [], 0.0
        for number, end in enumerate((*map(floatToGoString, DURATIONS_S), "+Inf")):
            count += figures.get(f"onload_bucket_{number}", 0)
            buckets.append((end, count))
        family.add_metric([model], buckets, figures.get("onload_s", 0.0))
    return family


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

    def __init__(
        self, ledger: Ledger, governor: Governor, held: Callable[[], Mapping[Key, int]]
    ) -> None:
        self._ledger = ledger
        self._governor = governor
        self._held = held

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
                booked.add_metric([str(domain), purpose.value], size)
            for what in ("limit", "capacity", "spare", "external", "free"):
                bounds.add_metric([str(domain), what], getattr(state, f"{what}_bytes"))
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
        yield from (self._read_bytes(), self._held_bytes(), self._processes())

    def _read_bytes(self) -> Metric:
        read = GaugeMetricFamily(
            "penstock_read_bytes", "What was read of our processes.", labels=["domain", "owner"]
        )
        for domain, owners in own_bytes_by_owner(self._governor.readings).items():
            for owner, size in owners.items():
                read.add_metric([domain, owner], size)
        return read

    def _held_bytes(self) -> Metric:
        held = GaugeMetricFamily(
            "penstock_held_bytes",
            "What is held of the books, as far as it is counted by purpose.",
            labels=["domain", "purpose"],
        )
        for (domain, purpose), size in self._held().items():
            held.add_metric([str(domain), purpose.value], size)
        return held

    def _processes(self) -> Metric:
        resident = GaugeMetricFamily(
            "penstock_process_resident_bytes", "Memory of a process, as read.", labels=["owner"]
        )
        readings = self._governor.readings
        for owner, reading in ({} if readings is None else readings.processes).items():
            resident.add_metric([owner], reading.resident_bytes)
        return resident


class _Counted(Collector):
    """Counts that are kept elsewhere, by one label or by several."""

    def __init__(
        self, name: str, about: str, labels: tuple[str, ...], counts: Mapping[Any, int]
    ) -> None:
        self._family = (name, about, labels)
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        """All of them now."""
        name, about, labels = self._family
        family = CounterMetricFamily(name, about, labels=labels)
        for key, count in self._counts.items():
            family.add_metric([key] if len(labels) == 1 else list(key), count)
        yield family
