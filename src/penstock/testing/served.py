"""`penstock serve` as a user starts it: a process of its own, in a cage or not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from penstock.memory.readings.gauge import read_process

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.testing.cage import Cage

_READY_S = 300.0
_STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """A running server."""

    url: str
    pid: int
    log: Path
    key: str = ""  # if it wants one

    def ask(self, path: str) -> httpx.Response:
        """Whatever it answers at a path."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.get(self.url + path, headers=headers, timeout=60)

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        return self.ask(path).raise_for_status().json()

    def wait_until_ready(self, patience_s: float = _READY_S) -> None:
        """Until the default model is loaded and has run a step."""
        deadline = time.monotonic() + patience_s
        while (answer := self.ask("/ready")).status_code != 200:
            assert time.monotonic() < deadline, f"not ready: {answer.text}\n{self.words()}"
            assert answer.json()["error"]["message"].endswith(("loading.", "absent.")), (
                f"{answer.text}\n{self.words()}"
            )
            time.sleep(0.1)

    def row(self, model: str) -> dict[str, Any]:
        """What `penstock ps` says of a model."""
        rows: dict[str, dict[str, Any]] = {r["name"]: r for r in self.get("/admin/api/models")}
        return rows[model]

    def processes(self) -> dict[int, int]:
        """Of the server and everything below it, by process id: memory that no file backs, as the
        kernel reads it. A page that several share counts once in their sum."""
        found: dict[int, int] = {}
        pids = [self.pid]
        while pids:
            pid = pids.pop()
            if (reading := read_process(pid)) is not None:
                found[pid] = reading.unbacked_bytes
                for children in Path(f"/proc/{pid}/task").glob("*/children"):
                    pids += map(int, children.read_text().split())
        return found

    def words(self, most: int = 4000) -> str:
        """The end of its log."""
        return self.log.read_text("utf-8", "replace")[-most:]


@contextmanager
def served(
    home: Path,
    log: Path,
    *flags: str,
    cage: Cage | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """Serve what is in `home` until the block ends; it must end cleanly by itself."""
    command = [sys.executable, "-m", "penstock", "serve", "--json", "--port=0", *flags]
    if cage is not None:
        command = cage.command(command)
    env = {**os.environ, "PENSTOCK_HOME": str(home), **(environment or {})}
    with (
        log.open("wb") as words,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, env=env) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"it did not start: {log.read_text('utf-8', 'replace')}"
            yield Served(str(json.loads(line)["url"]), process.pid, log)
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(_STOP_S)
        assert code == 0, f"it ended with {code}: {log.read_text('utf-8', 'replace')[-4000:]}"
