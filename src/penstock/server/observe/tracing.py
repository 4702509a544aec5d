"""OpenTelemetry spans of a request's states, where the extra `otel` is installed and wanted.

A request is one span with its wait, its prefill and its decode inside; they are made from the times
that are noted anyway, when the request is over. Where they go is said by OpenTelemetry's own
variables (`OTEL_EXPORTER_OTLP_ENDPOINT` and its kin); without one nothing is imported.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from penstock import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.server.observe.progress import Progress

log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_FLUSH_MS = 2000


class Spans:
    """Makes spans with a provider of OpenTelemetry's."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace import StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("penstock", __version__)
        self._failed = StatusCode.ERROR
        self._propagator = TraceContextTextMapPropagator()

    def record(self, request: Progress, error: BaseException | None) -> None:
        """A request is over."""
        from opentelemetry.trace import set_span_in_context

        # From the monotonic clock to the wall's.
        offset_s = time.time() - time.monotonic()
        parent = self._propagator.extract({"traceparent": request.asked.trace})
        ended = time.monotonic()

        def at(moment: float) -> int:
            return int((moment + offset_s) * 1e9)

        whole = self._tracer.start_span(
            "request", context=parent, start_time=at(request.asked.started),
            attributes=request.attributes(),
        )  # fmt: skip
        inside = set_span_in_context(whole)
        for name, begun, over in request.states(ended):
            self._tracer.start_span(name, context=inside, start_time=at(begun)).end(at(over))
        if error is not None:
            whole.set_status(self._failed, str(error) or type(error).__name__)
        whole.end(at(ended))

    def close(self) -> None:
        """Send what is left, for as long as a shutdown may take."""
        self._provider.force_flush(_FLUSH_MS)


def open_spans(environment: Mapping[str, str] = os.environ) -> Spans | None:
    """What the variables ask for; None: nothing."""
    if not any(environment.get(name) for name in _ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning(
            "%s is set, but OpenTelemetry is not installed (pip install penstock[otel]): no spans",
            " or ".join(_ENDPOINTS),
        )
        return None
    name = environment.get("OTEL_SERVICE_NAME", "penstock")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Spans(provider)
