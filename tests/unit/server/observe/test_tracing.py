"""Spans of a request's states; without the variable nothing is made."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from penstock.memory.clients.requests import RequestPool
from penstock.memory.domains import RAM
from penstock.memory.ledger import Ledger
from penstock.server.observe.live import LiveRequests
from penstock.server.observe.progress import Asked, Progress
from penstock.server.observe.tracing import Spans, open_spans

if TYPE_CHECKING:
    from collections.abc import Callable

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Usage:
    prompt_tokens: int = 7
    completion_tokens: int = 3
    cached_tokens: int = 2
    granted_tokens: int = 10


def progress(started: float, trace: str = "") -> Progress:
    memory = RequestPool(Ledger({RAM: 1 << 24}), 0, 1 << 20, 1.0).request_memory()
    return Progress(Asked("r", "m", "key 1", 0, 1, 1, memory, started, trace), Usage())


def test_states_follow_each_other() -> None:
    request = progress(10.0)
    assert request.states(12.0) == [("queued", 10.0, 12.0)]
    request.submitted = 11.0
    assert request.states(12.0) == [("queued", 10.0, 11.0), ("prefill", 11.0, 12.0)]
    request.first_token, request.last_token = 11.5, 13.0
    assert request.states(13.1)[-1] == ("decode", 11.5, 13.0)


def test_nothing_is_made_where_nobody_asks() -> None:
    assert open_spans({}) is None


def test_a_request_is_a_span_with_its_states_inside() -> None:
    trace: Any = pytest.importorskip("opentelemetry.sdk.trace")
    export: Any = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory: Any = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    provider = trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    live = LiveRequests()
    spans = Spans(provider)
    record: Callable[[Progress, BaseException | None], None] = spans.record
    live.on_end = record
    request = progress(time.monotonic() - 3, TRACE)
    request.submitted = request.asked.started + 1
    request.first_token, request.last_token = request.submitted + 1, request.submitted + 1.5
    with pytest.raises(ValueError, match="broken"), live.listed(request):
        raise ValueError("broken")
    made = {span.name: span for span in exporter.get_finished_spans()}
    assert set(made) == {"request", "queued", "prefill", "decode"}
    whole = made["request"]
    assert format(whole.context.trace_id, "032x") == TRACE.split("-")[1]
    assert all(
        made[name].parent.span_id == whole.context.span_id for name in set(made) - {"request"}
    )
    seconds = {name: (span.end_time - span.start_time) / 1e9 for name, span in made.items()}
    assert seconds["queued"] == pytest.approx(1, abs=1e-3)
    assert seconds["decode"] == pytest.approx(0.5, abs=1e-3)
    assert whole.attributes["gen_ai.usage.input_tokens"] == 7
    assert not whole.status.is_ok
