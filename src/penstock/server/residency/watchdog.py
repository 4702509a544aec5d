"""Workers that hang: work to do and not a word for longer than any step has ever taken.

What is measured is silence. A worker that serves speaks after each step and answers each order; it
is given several times the longest step there was and the time of its load, in which its largest
steps were measured. One that loads speaks of its progress, or at least uses the processor. Only
time in which this server itself ran counts, so nobody is ended because the machine slept.

Ending it makes it a death like any other: `residency` replaces it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.memory.readings.gauge import read_cpu_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.memory.events import Events
    from penstock.server.processes.supervisor import WorkerHandle

STEP_FACTOR = 4  # times the longest step, image or load
# Between two looks; the rest of a longer time is the server's own absence.
_MAX_BETWEEN_S = 10.0


@dataclass(slots=True)
class _Silence:
    signs: tuple[object, ...]  # of life; others: it lives
    silent_s: float = 0.0


class Watchdog:
    """The silence of every worker, judged on the governor's clock."""

    def __init__(
        self, hang_s: float, events: Events, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._hang_s = hang_s
        self._events = events
        self._clock = clock
        self._looked_at = clock()
        self._cpu_s: dict[int, float | None] = {}
        self._silences: dict[int, _Silence] = {}

    def read(self, workers: Iterable[WorkerHandle]) -> None:
        """What there is to read of processes; in a thread."""
        self._cpu_s = {w.pid: read_cpu_s(w.pid) for w in workers if not w.ready.done()}

    def judge(self, workers: Mapping[str, WorkerHandle]) -> None:
        """End those that have been silent for too long."""
        now = self._clock()
        passed_s = min(now - self._looked_at, _MAX_BETWEEN_S)
        self._looked_at = now
        known, self._silences = self._silences, {}
        for name, worker in workers.items():
            if not worker.alive or worker.end_expected or worker.hang:
                continue  # it is on its way out
            signs = self._signs(worker)
            silence = known.get(worker.pid)
            if signs is None or silence is None or silence.signs != signs:
                self._silences[worker.pid] = _Silence(signs or ())
                continue
            self._silences[worker.pid] = silence
            silence.silent_s += passed_s
            patience_s = self._patience_s(worker)
            if silence.silent_s > patience_s:
                self._end(name, worker, silence.silent_s, patience_s)

    def _signs(self, worker: WorkerHandle) -> tuple[object, ...] | None:
        """What changes while it works; None if nothing is to be expected of it, or to be known."""
        if worker.ready.done():
            return (worker.words_heard,) if worker.client.expects else None
        cpu_s = self._cpu_s.get(worker.pid)
        return None if cpu_s is None else (worker.words_heard, cpu_s)

    def _patience_s(self, worker: WorkerHandle) -> float:
        if not worker.ready.done():
            return self._hang_s
        client = worker.client
        longest_s = max(client.longest_step_s, client.ready.load_s, client.ready.image_s)
        return max(self._hang_s, STEP_FACTOR * longest_s)

    def _end(self, name: str, worker: WorkerHandle, silent_s: float, patience_s: float) -> None:
        what = "did no step" if worker.ready.done() else "made no progress with its load"
        self._events.add(
            "hang",
            model=name,
            pid=worker.pid,
            loading=not worker.ready.done(),
            silent_s=round(silent_s, 1),
            patience_s=round(patience_s, 1),
            requests=worker.client.open_requests,
        )
        worker.end_hung(f"it {what} for {silent_s:.0f} s with work to do")
