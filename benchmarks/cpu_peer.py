"""The engine against llama-cpp-python on the same GGUF files, and both servers under 8 clients.

    python -m benchmarks.cpu_peer --peer PYTHON --models FOLDER ... [--rounds 5] [--threads 2]
    python -m benchmarks.cpu_peer --peer PYTHON --models FOLDER --http

`PYTHON` is one that has llama-cpp-python, built for this processor. A model's folder is as
`penstock pull` leaves it, with the GGUF file inside. Each side is a process of its own that holds
its model and waits while the other computes; rounds alternate. Tokens a second are medians with the
least and the most. Memory is what a process holds beyond itself before it has a model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import cpu_peer_http
from benchmarks.engine import prompts
from benchmarks.report import record
from penstock.server.processes.fork_server_client import WORKER_ENVIRONMENT
from penstock.wire import LoadSpec, Sampling, Submit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.worker.core.engine import GenerateEngine

NEW, PROMPT, WARM_STEPS = 48, 200, 4
CONTEXT = 4096  # tokens of KV that either side has
PEER = Path(__file__).with_name("cpu_peer_llama.py")
MEASURES = "decode 1", "decode 8", "prefill 512", "prefill 2000"


class Side:
    """A process that answers one line with one."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.about: list[str] = self._answer()

    def measure(self, what: str, size: int = 0) -> float:
        """Tokens a second, or bytes."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what} {size} {NEW}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        """No more questions."""
        self._process.communicate()


def main() -> None:
    """Measure every model, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer")
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--claim", default="cpu_peer_starter")
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        _serve(options.models[0], options.threads)
        return
    if options.http:
        found = cpu_peer_http.compare(options.peer, options.models[0], options.rounds)
        record("cpu_peer_http", found)
        return
    for folder in options.models:
        record(options.claim, _compare(options, folder))


def _compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    file, threads = next(folder.glob("*.gguf")), options.threads
    plain = {name: value for name, value in os.environ.items() if name not in WORKER_ENVIRONMENT}
    how = ["--ours", "--models", str(folder), "--threads", str(threads)]
    ours = Side([sys.executable, "-m", __spec__.name, *how], {**plain, **WORKER_ENVIRONMENT})
    theirs = Side([options.peer, str(PEER), str(file), str(threads)], plain)
    figures: dict[str, Any] = {"model": folder.name, "llama-cpp-python": theirs.about[0]}
    figures["threads"] = threads
    for measure in options.measures:
        what, size = measure.split()
        for side in (ours, theirs):
            side.measure(what, int(size))  # warms up
        pairs = [
            (ours.measure(what, int(size)), theirs.measure(what, int(size)))
            for _ in range(options.rounds)
        ]
        figures[f"{measure}, tokens/s"] = row = _row(*zip(*pairs, strict=True))
        sys.stderr.write(f"{folder.name}, {measure}: {row}\n")
    mib = [round(side.measure("resident") / (1 << 20)) for side in (ours, theirs)]
    bases = [round(side.measure("base") / (1 << 20)) for side in (ours, theirs)]
    figures["resident beyond the base, MiB"] = _plain(mib)
    figures["base: the process without a model, MiB"] = _plain(bases)
    for side in (ours, theirs):
        side.end()
    return figures


def _row(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | str]:
    medians = statistics.median(ours), statistics.median(theirs)
    return {
        "ours": round(medians[0], 1),
        "ours from to": f"{min(ours):.1f} to {max(ours):.1f}",
        "llama.cpp": round(medians[1], 1),
        "llama.cpp from to": f"{min(theirs):.1f} to {max(theirs):.1f}",
        "ratio": round(medians[0] / medians[1], 2),
    }


def _plain(pair: list[int]) -> dict[str, float]:
    return {"ours": pair[0], "llama.cpp": pair[1], "ratio": round(pair[0] / pair[1], 2)}


def _serve(folder: Path, threads: int) -> None:
    """Our side."""
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries print what they like
    measure = _ours(folder, threads)
    os.write(answers, b"[]\n")
    for line in sys.stdin:
        what, size, new = line.split()
        os.write(answers, json.dumps(measure(what, int(size), int(new))).encode() + b"\n")


def _ours(folder: Path, threads: int) -> Callable[[str, int, int], float]:
    from penstock.worker import preload  # noqa: F401 - the base is that of a worker
    from penstock.worker.loading import load
    from penstock.worker.process_memory import resident_bytes
    from penstock.worker.profiling import short

    base = resident_bytes()[0]
    spec = LoadSpec(
        *(folder.name, str(folder), "cpu", "float32"),
        memory_bytes=1 << 30,
        kv_tokens=CONTEXT,
        threads=threads,
        step_tokens=512,
        step_sequences=16,
    )
    # What steps cost in bytes is not measured here: a first profile, of steps as large as asked.
    short.limits_of = lambda context, step_s: context.limits
    engine, context = load(spec, lambda *_: None)

    def measure(what: str, size: int, new: int) -> float:
        if what == "base":
            return base
        if what == "resident":
            return resident_bytes()[0] - base
        if what == "prefill":
            return _prefill(engine, prompts(1, size, context.vocabulary)[0])
        return _decode(engine, prompts(size, PROMPT, context.vocabulary), new)

    return measure


def _unknown(number: int, prompt: list[int], new: int) -> Submit:
    """A request whose KV is computed, though an earlier one had the same prompt."""
    return Submit(number, list(prompt), new, Sampling(temperature=0), salt=os.urandom(8))


def _decode(engine: GenerateEngine, batch: list[list[int]], new: int) -> float:
    for number, prompt in enumerate(batch):
        engine.submit(_unknown(number, prompt, new))
    seconds = []
    while engine.has_work():
        began = time.perf_counter()
        engine.step()
        if engine.status().step_tokens == len(batch):
            seconds.append(time.perf_counter() - began)
    steps = seconds[WARM_STEPS:]
    return len(batch) * len(steps) / sum(steps)


def _prefill(engine: GenerateEngine, prompt: list[int]) -> float:
    engine.submit(_unknown(0, prompt, 1))
    began = time.perf_counter()
    while engine.has_work():
        engine.step()
    return len(prompt) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
