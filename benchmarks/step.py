"""A decode step with its layers in one compiled call, and by modules with a kernel each.

    python -m benchmarks.step [--models FOLDER ...] [--rounds 5] [--threads 1]

One process, no server, no profile; the two ways alternate. Figures are medians over rounds of the
median step, in milliseconds of processor time: on one thread that is what the step costs whatever
else the machine does, but for what the caches and the memory lose to others.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import record, starter_folder
from penstock.server.processes.fork_server_client import WORKER_ENVIRONMENT
from penstock.wire import LoadSpec, Sampling, Submit
from penstock.worker import loading
from penstock.worker.backends import open_backend
from penstock.worker.backends.cpu.kernels.one_call import layer_runs
from penstock.worker.core.plan import Plan, Slice
from penstock.worker.load_phases import LoadPhases

if TYPE_CHECKING:
    from penstock.worker.profiling.context import ProfileContext

CONTEXT, NEW = 200, 16


def main() -> None:
    """Measure one stream and eight."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, nargs="*", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if not os.environ.items() >= WORKER_ENVIRONMENT.items():  # of the heap and of threads
        again = [sys.executable, "-m", __spec__.name, *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, **WORKER_ENVIRONMENT})
    figures: dict[str, Any] = {}
    for folder in options.models or [starter_folder()]:
        context = _load(folder, options.threads)
        for streams in (1, 8):
            found = _alternate(context, streams, options.rounds)
            figures[f"{folder.name}, {streams} at once"] = found
    record("step", figures)


def _alternate(context: ProfileContext, streams: int, rounds: int) -> dict[str, float]:
    """Both ways in turn; the first round warms up."""
    most = layer_runs.MOST_ROWS
    times: dict[int, list[float]] = {0: [], most: []}
    for number in range(rounds + 1):
        for rows, found in times.items():
            layer_runs.MOST_ROWS = rows
            step_ms = 1e3 * statistics.median(_steps(context, streams))
            if number:
                found.append(step_ms)
    layer_runs.MOST_ROWS = most
    modules, fused = (statistics.median(found) for found in times.values())
    return {
        "modules ms": round(modules, 1),
        "one call ms": round(fused, 1),
        "one call least ms": round(min(times[most]), 1),
        "one call most ms": round(max(times[most]), 1),
        "ratio": round(modules / fused, 2),
    }


def _load(folder: Path, threads: int) -> ProfileContext:
    spec = LoadSpec(
        folder.name, str(folder), "cpu", "float32", 1 << 30, threads=threads, capped=False
    )
    backend = open_backend("cpu")
    loading._prepare_torch(threads)
    model = loading._load_model(spec, backend, lambda *_: None, LoadPhases())
    return loading._profile_context(spec, backend, model, loading._kept(spec, backend, model))


def _steps(context: ProfileContext, streams: int) -> list[float]:
    """Processor seconds of each step."""
    executor, kv, chance = context.executor, context.kv, random.Random(streams)
    handles = []
    for number in range(streams):
        tokens = chance.choices(range(100, context.vocabulary), k=CONTEXT)
        handle = kv.open(tokens)
        kv.admit(handle, kv.match(handle, 0), CONTEXT + NEW, fetch=False)
        kv.extend(handle, CONTEXT)
        executor.admit(Submit(number, tokens, NEW, Sampling(temperature=0)))
        executor.compute(Plan(chunks=[Slice(number, 0, tokens, handle.arrays, 0, False)]))
        handles.append(handle)
    seconds = []
    for position in range(CONTEXT, CONTEXT + NEW):
        pieces = []
        for number, handle in enumerate(handles):
            kv.extend(handle, position + 1)
            token = chance.randrange(100, context.vocabulary)
            pieces.append(Slice(number, position, [token], handle.arrays, 1, True))
        begun = time.process_time()
        executor.compute(Plan(decodes=pieces))
        seconds.append(time.process_time() - begun)
    for number, handle in enumerate(handles):
        kv.release(handle)
        executor.forget(number)
    return seconds[2:]


if __name__ == "__main__":
    main()
