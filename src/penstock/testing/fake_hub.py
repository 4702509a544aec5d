"""The Hugging Face hub, played by a local server: the few routes that a download uses."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class FakeHub(BaseHTTPRequestHandler):
    """One repository, `org/name`, that holds `files`."""

    files: dict[str, bytes]
    stalls: threading.Event  # until it is set, a weight file stops coming half-way
    starts: list[int]  # the offsets from which weights were asked for

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _listed(self, name: str) -> dict[str, Any]:
        data = self.files[name]
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry = {"rfilename": name, "size": len(data), "blobId": blob}
        if name.endswith(".safetensors"):
            entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        return entry

    def _answer(self, body: bool) -> None:
        if self.path.startswith("/api/models/org/name"):
            siblings = [self._listed(name) for name in self.files]
            info = {"id": "org/name", "sha": "c" * 40, "siblings": siblings}
            self._send(200, json.dumps(info).encode(), body)
            return
        name = self.path.partition("/resolve/" + "c" * 40 + "/")[2].partition("?")[0]
        if name not in self.files:
            self._send(404, b"", body)
            return
        data, start = self.files[name], 0
        if header := self.headers.get("Range"):
            start = int(header.removeprefix("bytes=").partition("-")[0])
        if body and name == "model.safetensors":
            self.starts.append(start)
        self._send(206 if start else 200, data[start:], body, name)

    def _send(self, status: int, data: bytes, body: bool, name: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not body:
            return
        half = len(data) // 2
        self.wfile.write(data[:half])
        self.wfile.flush()
        if name == "model.safetensors":
            self.stalls.wait()
        with contextlib.suppress(ConnectionError):  # the client was killed meanwhile
            self.wfile.write(data[half:])


@contextmanager
def playing_hub(files: dict[str, bytes]) -> Iterator[str]:
    """The hub's address. Weights come whole until `FakeHub.stalls` is cleared."""
    FakeHub.files = files
    FakeHub.starts = []
    FakeHub.stalls = threading.Event()
    FakeHub.stalls.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        FakeHub.stalls.set()
        server.shutdown()
        server.server_close()
        thread.join()
