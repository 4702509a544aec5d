"""Where a decode step goes, kernel by kernel: device time and launches, over all layers.

    python -m benchmarks.gpu_kernels [--streams 1,32,128] [--context 512]

Steps of decodes alone, replayed from their graphs as when serving, under torch's profiler.
"""

from __future__ import annotations

import argparse
import collections
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.report import record
from penstock import shapes
from penstock.wire import LoadSpec, Sampling, Submit
from penstock.worker.loading import load_engine

if TYPE_CHECKING:
    from penstock.worker.core.engine import GenerateEngine

STEPS = 20
SHOWN = 16  # kernels; the rest is one line


def main() -> None:
    """Load once, profile each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="random:qwen3-8b")
    parser.add_argument("--streams", default="1,32,128")
    parser.add_argument("--context", type=int, default=512)
    options = parser.parse_args()
    streams = [int(text) for text in options.streams.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        shapes.write_folder(options.shape, Path(folder))
        spec = LoadSpec(
            *(options.shape, folder, "cuda:0", "auto", 32 << 30),
            step_tokens=8192,
            step_sequences=max(streams),
            capped=False,
        )
        engine = load_engine(spec, lambda *_: None)
    found = {f"{count} streams": _steps(engine, count, options.context) for count in streams}
    record("gpu_kernels", found)


def _steps(engine: GenerateEngine, count: int, context: int) -> dict[str, Any]:
    for number in range(count):
        engine.submit(Submit(number, [number + 1] * context, 128, Sampling(temperature=0)))
    while engine.status().step_tokens != count:
        engine.step()
    for _ in range(8):
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
    for number in range(count):
        engine.cancel(number)
    while engine.has_work():
        engine.step()
    times: collections.Counter[str] = collections.Counter()
    launches: collections.Counter[str] = collections.Counter()
    for event in profiler.events():
        if event.device_type.name != "CUDA":
            continue
        times[event.name[:60]] += event.device_time_total
        launches[event.name[:60]] += 1
    kernels = {
        name: [round(spent / STEPS, 1), round(launches[name] / STEPS, 1)]
        for name, spent in times.most_common(SHOWN)
    }
    return {
        "us_and_launches": kernels,
        "us_all": round(sum(times.values()) / STEPS, 1),
        "launches_all": round(sum(launches.values()) / STEPS, 1),
    }


if __name__ == "__main__":
    main()
