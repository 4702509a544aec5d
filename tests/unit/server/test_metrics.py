"""The text of `/metrics`: the official parser reads it, and it follows Prometheus' conventions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from penstock.memory.domains import RAM, Domain
from penstock.memory.events import Events
from penstock.memory.governor import Governor, Readings
from penstock.memory.ledger import Ledger, Purpose
from penstock.memory.readings.gauge import ProcessReading, RamReading
from penstock.server.metrics import Metrics
from penstock.tiers.rates import Durations
from penstock.wire import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import Metric

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "penstock.json"
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}

PROCESSES = {"server": 5, "grammars m": 7, "grammars m, process 11": 1, "grammars m, process 12": 2}
READINGS = Readings(
    RamReading(0, 0),
    (),
    {owner: ProcessReading(0, 0, 0, 0, size) for owner, size in PROCESSES.items()},
    {Domain.gpu(0): 20},
)


class _Watch:
    """Nothing to see."""

    def reader(self) -> Callable[[], Readings]:
        return lambda: READINGS

    def reconcile(self, readings: Readings) -> None:
        pass

    def busy(self) -> bool:
        return False


def status(**tier: float) -> Status:
    return Status(
        running=1, waiting=2, kv_capacity_bytes=10, kv_free_bytes=5, step_tokens=1, step_s=0.1,
        host_s=0.01, preemptions=3, steps=4, tier=tier,
    )  # fmt: skip


def made() -> tuple[Metrics, Events]:
    """Metrics of which each has been moved."""
    ledger = Ledger({RAM: 1000})
    events = Events()
    governor = Governor(ledger, _Watch(), [], set(), events)
    durations = Durations()
    for seconds in (0.0005, 0.02, 0.02, 100.0):
        durations.add(seconds)
    tier = {**durations.figures("onload"), "onload_s": durations.sum_s, "hits": 3.0}
    statuses = {'a "quoted" name': status(**tier)}
    refusals = {("overloaded", "queue"): 2}
    governor.readings = READINGS
    held = {(RAM, Purpose.KV): 30, (Domain.gpu(0), Purpose.KV): 40}
    metrics = Metrics(lambda: statuses, ledger, governor, refusals, lambda: held)
    metrics.tokenised("m", 0.1)
    metrics.queued("m", 0.2)
    metrics.loaded("m", 3.0)
    metrics.first_token("m", 0.5)
    metrics.prompt("m", 7)
    metrics.tokens_out("m", 1, None)
    metrics.tokens_out("m", 3, 0.3)
    metrics.answered("/v1/models", 200, 0.01)
    metrics.answered("/v1/models", None, 0.01)
    events.add("shed", domain="ram", act="caches")
    events.add("restart", model="m")
    return metrics, events


def families() -> dict[str, Metric]:
    metrics, _ = made()
    parsed = text_string_to_metric_families(metrics.render().decode())
    return {family.name: family for family in parsed}


def sample(name: str, **labels: str) -> float:
    found = [
        one.value
        for family in families().values()
        for one in family.samples
        if one.name == name and one.labels.items() >= labels.items()
    ]
    assert len(found) == 1, (name, labels, found)
    return float(found[0])


def test_every_family_has_words_a_type_and_a_name_by_convention() -> None:
    for name, family in families().items():
        if name.endswith("_created"):
            continue
        assert family.documentation.endswith("."), name
        assert family.type in _SUFFIXES, (name, family.type)
        assert re.fullmatch(r"penstock_[a-z_]+", name), name
        # Base units, and no unit inside a name.
        assert not re.search(r"_(ms|milliseconds|kb|mib|percent|count)(_|$)", name), name
        for one in family.samples:
            suffix = one.name.removeprefix(name)
            assert suffix in (*_SUFFIXES[family.type], "_created"), one.name


def test_buckets_grow_and_end_with_all() -> None:
    for name, family in families().items():
        if family.type != "histogram":
            continue
        series: dict[str, list[float]] = {}
        counts: dict[str, float] = {}
        for one in family.samples:
            labels = str({key: value for key, value in one.labels.items() if key != "le"})
            if one.name == f"{name}_bucket":
                series.setdefault(labels, []).append(one.value)
            elif one.name == f"{name}_count":
                counts[labels] = one.value
        assert series, name
        for labels, values in series.items():
            assert values == sorted(values), name
            assert values[-1] == counts[labels], name


def test_what_was_counted_is_there() -> None:
    assert sample("penstock_refusals_total", code="overloaded", reason="queue") == 2
    assert sample("penstock_sheds_total", domain="ram", act="caches") == 1
    assert sample("penstock_worker_restarts_total", model="m") == 1
    assert sample("penstock_requests_total", status="gone") == 1
    assert sample("penstock_kv_disk_hits_total", model='a "quoted" name') == 3
    assert sample("penstock_load_seconds_sum", model="m") == 3.0
    # A step that gave three tokens counts as three times between two.
    assert sample("penstock_time_between_tokens_seconds_count", model="m") == 3
    assert abs(sample("penstock_time_between_tokens_seconds_sum", model="m") - 0.3) < 1e-9


def test_readings_are_by_owner_and_what_is_held_by_purpose() -> None:
    assert sample("penstock_read_bytes", domain="ram", owner="server") == 5
    # Processes that come and go would be a new series each.
    assert sample("penstock_read_bytes", domain="ram", owner="grammars m") == 10
    assert sample("penstock_read_bytes", domain="gpu:0") == 20
    assert sample("penstock_held_bytes", domain="ram", purpose="kv") == 30
    assert sample("penstock_held_bytes", domain="gpu:0", purpose="kv") == 40


def test_onloads_are_the_worker_s_own_histogram() -> None:
    assert sample("penstock_kv_onload_seconds_count") == 4
    assert sample("penstock_kv_onload_seconds_bucket", le="0.001") == 1
    assert sample("penstock_kv_onload_seconds_bucket", le="0.025") == 3
    assert sample("penstock_kv_onload_seconds_bucket", le="5.0") == 3
    assert abs(sample("penstock_kv_onload_seconds_sum") - 100.0405) < 1e-6


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    exported = {
        f"{name}{suffix}"
        for name, family in families().items()
        for suffix in _SUFFIXES.get(family.type, ())
    }
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    targets = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    variables = [str(one["query"]) for one in dashboard["templating"]["list"]]
    asked = set(re.findall(r"penstock_\w+", " ".join(targets + variables)))
    assert len(asked) > 30
    assert asked <= exported
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
