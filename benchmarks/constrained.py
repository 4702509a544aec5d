"""What a grammar adds to a decode step: eight streams, free and held to a JSON schema, in turn.

    python -m benchmarks.constrained [--model FOLDER] [--rounds 5]

The same engine runs both; rounds alternate so that a noisy machine hits both alike, and each figure
is the median over all decode steps. Compiling happens beside the prefill and is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from msgspec import structs

from benchmarks.engine import prompts
from benchmarks.report import record, starter_folder
from penstock.testing.grammar_hosts import LocalHost, checked_grammar
from penstock.text.grammars.grammar import Format
from penstock.wire import LoadSpec, Sampling, Submit
from penstock.worker.loading import load_engine

STREAMS = 8
NEW = 32
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 20},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def main() -> None:
    """Measure and print both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    folder = options.model or starter_folder()
    spec = LoadSpec(folder.name, str(folder), "cpu", "float32", memory_bytes=2 << 30)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    host = LocalHost.of_model(folder, vocabulary)
    spec = structs.replace(spec, grammar_fd=os.dup(host.worker_end.fileno()))
    engine = load_engine(spec, lambda *_: None)
    grammar = host.key(checked_grammar(Format("json_schema", SCHEMA)))
    free: list[float] = []
    held: list[float] = []
    _round(engine, grammar)  # compiled and warm
    for _ in range(options.rounds):
        free += _round(engine, None)
        held += _round(engine, grammar)
    before, after = statistics.median(free), statistics.median(held)
    figures = {
        "free_ms": round(1e3 * before, 2),
        "constrained_ms": round(1e3 * after, 2),
        "ratio": round(after / before, 3),
    }
    record("constrained", figures)
    host.close()


def _round(engine: Any, grammar: bytes | None) -> list[float]:
    """Seconds of each step in which every stream decodes."""
    for number, prompt in enumerate(prompts(STREAMS, 60, 40_000)):
        how = Sampling(temperature=1.0, seed=number)
        engine.submit(Submit(number, prompt, NEW, how, [2], grammar=grammar))
    times = []
    while engine.has_work():
        started = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == STREAMS and all(output.tokens for output in outputs):
            times.append(time.perf_counter() - started)
    return times[1:]


if __name__ == "__main__":
    main()
