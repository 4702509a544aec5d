"""Two honest clients in processes of their own: one asks `/health`, one reads streams.

What they see of a server under attack is not blurred by the attacker, who keeps this process busy.
`watch_health` and `watch_stream` start one and hand out its samples at the end. Run as a program
it is the observer itself: it works until its standard input ends, then prints its samples.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEALTH_EVERY_S = 0.02
_HEALTH_S = 30.0
_STREAM_S = 120.0
_END_S = 60.0


@dataclass(slots=True)
class Health:
    """How long `/health` took, each time on a new connection."""

    seconds: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        """The time within which so many of a hundred were answered."""
        assert self.seconds, f"no answer at all: {self.faults[:3]}"
        ordered = sorted(self.seconds)
        return ordered[min(int(len(ordered) * share / 100), len(ordered) - 1)]

    def __str__(self) -> str:
        return (
            f"/health {len(self.seconds)} times: median {1000 * self.percentile(50):.1f}, "
            f"p99 {1000 * self.percentile(99):.1f}, worst {1000 * max(self.seconds):.1f} ms; "
            f"{len(self.faults)} faults {self.faults[:2]}"
        )


@dataclass(slots=True)
class Stream:
    """The gaps between the events of streamed answers, one answer after another."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # until an answer's first event
    faults: list[str] = field(default_factory=list)

    @property
    def longest_gap_s(self) -> float:
        """Within an answer."""
        return max(self.gaps, default=0.0)

    @property
    def usual_gap_s(self) -> float:
        """The median."""
        return sorted(self.gaps)[len(self.gaps) // 2] if self.gaps else 0.0

    def __str__(self) -> str:
        return (
            f"stream of {len(self.gaps)} gaps: usual {1000 * self.usual_gap_s:.0f}, longest "
            f"{1000 * self.longest_gap_s:.0f} ms, first event after at most "
            f"{1000 * max(self.first, default=0.0):.0f} ms; {len(self.faults)} faults "
            f"{self.faults[:2]}"
        )


@contextmanager
def watch_health(url: str) -> Iterator[Health]:
    """Ask `/health` until the block ends; the samples are there then."""
    health = Health()
    with _observer("health", url, "") as samples:
        yield health
    health.seconds, health.faults = samples["seconds"], samples["faults"]


@contextmanager
def watch_stream(url: str, body: dict[str, object], key: str = "") -> Iterator[Stream]:
    """Stream chats with this body, one after another, until the block ends."""
    stream = Stream()
    with _observer("stream", url, json.dumps({"body": body, "key": key})) as samples:
        yield stream
    stream.gaps, stream.first = samples["gaps"], samples["first"]
    stream.faults = samples["faults"]


@contextmanager
def _observer(what: str, url: str, more: str) -> Iterator[dict[str, Any]]:
    samples: dict[str, Any] = {}
    command = [sys.executable, "-m", __name__, what, url, more]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"first\n"  # it has been answered once
            yield samples
        except BaseException:
            process.kill()
            raise
        said, _ = process.communicate(timeout=_END_S)
    samples |= json.loads(said)


# --- the observers themselves ------------------------------------------------------------------


def main(what: str, url: str, more: str) -> None:
    """Observe until the standard input ends."""
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    samples = _health(url, ended) if what == "health" else _streams(url, json.loads(more), ended)
    sys.stdout.write(json.dumps(samples))


def _connect(url: str, timeout: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)


def _begun(count: list[int]) -> None:
    if not count:
        count.append(1)
        sys.stdout.write("first\n")
        sys.stdout.flush()


def _health(url: str, ended: threading.Event) -> dict[str, list[Any]]:
    seconds: list[float] = []
    faults: list[str] = []
    count: list[int] = []
    while not ended.wait(_HEALTH_EVERY_S):
        begun = time.monotonic()
        try:
            with contextlib.closing(_connect(url, _HEALTH_S)) as connection:
                connection.request("GET", "/health")
                answer = connection.getresponse()
                answer.read()
            if answer.status != 200:
                faults.append(f"status {answer.status}")
        except OSError as error:
            faults.append(repr(error))
        seconds.append(time.monotonic() - begun)
        _begun(count)
    return {"seconds": seconds, "faults": faults}


def _streams(url: str, order: dict[str, Any], ended: threading.Event) -> dict[str, list[Any]]:
    samples: dict[str, list[Any]] = {"gaps": [], "first": [], "faults": []}
    count: list[int] = []
    while not ended.is_set():
        try:
            with contextlib.closing(_connect(url, _STREAM_S)) as connection:
                _stream(connection, order, ended, samples, count)
        except (OSError, http.client.HTTPException) as error:
            samples["faults"].append(repr(error))
            ended.wait(0.1)
        _begun(count)
    return samples


def _stream(
    connection: http.client.HTTPConnection,
    order: dict[str, Any],
    ended: threading.Event,
    samples: dict[str, list[Any]],
    count: list[int],
) -> None:
    headers = {"content-type": "application/json"}
    if order["key"]:
        headers["authorization"] = f"Bearer {order['key']}"
    last, begun = time.monotonic(), False
    body = {**order["body"], "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        samples["faults"].append(f"status {answer.status}: {answer.read(300)!r}")
        return
    while line := answer.readline():
        if ended.is_set() or line.startswith(b"data: [DONE]"):
            return
        if not line.startswith(b"data: "):
            continue
        if b'"error"' in line:
            samples["faults"].append(line.decode())
        now = time.monotonic()
        samples["gaps" if begun else "first"].append(now - last)
        last, begun = now, True
        _begun(count)
    samples["faults"].append("the stream ended before [DONE]")


if __name__ == "__main__":
    main(*sys.argv[1:4])
