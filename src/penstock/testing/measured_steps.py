"""Steps of random shapes that no profile has tried: what was predicted, and what they took.

In a process with a worker's environment, since what a step takes depends on the settings of the C
allocator: `python -m penstock.testing.measured_steps`, which `measured_steps` starts.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import torch

from penstock.server.processes.fork_server_client import WORKER_ENVIRONMENT
from penstock.testing.envelope import MeasuredStep
from penstock.wire import LoadSpec
from penstock.worker.loading import load
from penstock.worker.profiling.stress import StepShapeTrial, Stress

if TYPE_CHECKING:
    from penstock.worker.core.engine import GenerateEngine


def measured_steps(
    spec: LoadSpec, count: int, *, seed: int = 2, timeout_s: float = 600
) -> list[MeasuredStep]:
    """Load `spec` in a process of its own and run `count` random steps; largest measured last."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, msgspec.json.encode(spec), str(count), str(seed)],
        stdout=subprocess.PIPE,
        timeout=timeout_s,
        check=True,
        env={**os.environ, **WORKER_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    steps = [MeasuredStep(*json.loads(line)) for line in done.stdout.splitlines()]
    return sorted(steps, key=lambda step: step.measured_bytes)


def _trial(chance: random.Random, engine: GenerateEngine) -> StepShapeTrial:
    """A step that the scheduler could plan, of any kind."""
    limits, longest = engine.profile.limits, engine.ready().context
    decodes = chance.choice([0, 1, chance.randrange(0, limits.sequences - 1)])
    scored = chance.choice([0, 0, chance.randrange(1, limits.logit_rows - limits.sequences + 1)])
    context = chance.randrange(1, longest + 1)
    most = min(limits.tokens - decodes - scored, context, max(16, limits.pairs // context))
    chunk = chance.choice([0, 1, most, chance.randrange(1, most + 1)]) if decodes else most
    several = chance.randrange(1, max(2, limits.sequences - decodes - 1))
    return StepShapeTrial(
        decodes=decodes,
        decode_context=chance.randrange(1, max(2, longest // 8)),
        chunk=chunk,
        context=context,
        prompts=min(chance.choice([1, 1, several]), max(1, chunk)),
        scored=scored,
        scored_context=chance.randrange(1, longest + 1),
        demanding=chance.random() < 0.5,
        alike=chance.random() < 0.3,
    )


def _main(spec: LoadSpec, count: int, seed: int) -> None:
    if spec.threads:
        torch.set_num_threads(spec.threads)
    engine, context = load(spec, lambda *_: None)
    cost, chance = engine.ready().cost, random.Random(seed)
    stress = Stress(
        context.executor, context.memory, context.kv, context.meter, context.limits.tokens
    )
    for _ in range(count):
        shape, took = stress.measure(_trial(chance, engine), context.vocabulary)
        predicted = cost.step(shape.tokens, shape.sequences, shape.context, shape.logit_rows)
        sys.stdout.write(json.dumps([predicted, took, str(shape)]) + "\n")


if __name__ == "__main__":
    _main(msgspec.json.decode(sys.argv[1], type=LoadSpec), int(sys.argv[2]), int(sys.argv[3]))
