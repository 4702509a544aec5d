"""Spans on their way to a collector: a server that OpenTelemetry's variables point at one."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.fake_server import add_model, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """The bodies that were sent to it."""
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    yield received
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_request_s_states_reach_the_collector(collector: list[bytes], tmp_path: Path) -> None:
    wire: Any = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    add_model(tmp_path, "fake")
    body = {"model": "fake", "prompt": "hi", "max_tokens": 4}
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    with serving(tmp_path) as server:
        asked = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert asked.status_code == 200
    spans = [
        span
        for one in collector  # what was left was sent before the server ended
        for resource in wire.ExportTraceServiceRequest.FromString(one).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert {span.name for span in spans} == {"request", "queued", "prefill", "decode"}
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    whole = next(span for span in spans if span.name == "request")
    said = {one.key: one.value for one in whole.attributes}
    assert said["gen_ai.request.model"].string_value == "fake"
    assert said["gen_ai.usage.output_tokens"].int_value == 4
