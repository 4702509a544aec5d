"""How near an engine comes to what the device can do, measured in the same run.

    python -m penstock.worker.profiling.bench FOLDER --device cuda:0 --streams 1,32 --prefill 4096

The floor of a decode step is the time in which the device copies as many bytes as the step must
read: every weight but the input embedding once, and the KV of every stream. Prefill is compared
with a large matrix product in the model's type. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from penstock.wire import LoadSpec, Sampling, Submit
from penstock.worker.backends import default_device, open_backend
from penstock.worker.loading import load
from penstock.worker.models.linear import (
    LinearWeight,
    PackedEmbedding,
    PackedExperts,
    PlainWeight,
    weight_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from transformers import PreTrainedModel

    from penstock.worker.backends.base import Backend
    from penstock.worker.core.engine import GenerateEngine
    from penstock.worker.profiling.context import ProfileContext

_GREEDY = Sampling(temperature=0)
_seeds = itertools.count()
_EXPERT_DIMS = 3  # transformers keeps the experts of a layer as one weight, [experts, out, in]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reaches when it does one thing only."""

    copy_bytes_per_s: float
    flops: float


@dataclass(frozen=True, slots=True)
class Demand:
    """What a model asks of a device, per step and per token."""

    read_bytes: int  # of weights, in every step, experts aside
    expert_bytes: int  # of all experts
    chosen: float  # share of the experts that a token sees
    kv_bytes: int  # of a token
    token_flops: float  # of one row, attention aside
    pair_flops: float  # of one row over one token


def main() -> None:
    """Load, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--memory", type=int, default=32 << 30, help="bytes for KV and steps")
    parser.add_argument("--streams", default="1,32", help="decode with so many at once")
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt then")
    parser.add_argument("--new", type=int, default=128, help="tokens that each stream decodes")
    parser.add_argument("--prefill", default="", help="prompts of so many tokens")
    parser.add_argument("--step-tokens", type=int, help="otherwise 8192, or 1024 on a CPU")
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    backend = open_backend(options.device)
    streams = [int(text) for text in options.streams.split(",") if text]
    spec = LoadSpec(
        name=options.folder,
        path=options.folder,
        device=options.device,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        memory_bytes=options.memory,
        step_tokens=options.step_tokens or (8192 if backend.full_steps_are_cheap else 1024),
        step_sequences=max([*streams, 1]),
        capped=False,
    )
    started = time.perf_counter()
    engine, loaded = load(spec, lambda *_: None)
    load_s = time.perf_counter() - started
    report = measure(engine, loaded, options, streams)
    report["load_s"] = round(load_s, 1)
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


def measure(
    engine: GenerateEngine,
    loaded: ProfileContext,
    options: argparse.Namespace,
    streams: list[int],
) -> dict[str, Any]:
    """All figures."""
    backend, model = loaded.backend, loaded.executor.model
    ceilings = ceilings_of(backend, model.dtype)
    demand = demand_of(model, engine.ready().cost.kv.token_bytes)
    how = Sampling(temperature=options.temperature, seed=1) if options.temperature else _GREEDY
    report: dict[str, Any] = {
        "device": backend.processor,
        "torch": torch.__version__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": loaded.memory.format.name,
        "copy_tb_per_s": round(ceilings.copy_bytes_per_s / 1e12, 2),
        "matmul_tflops": round(ceilings.flops / 1e12, 1),
        "decode": [],
        "prefill": [],
    }
    vocabulary = model.config.get_text_config().vocab_size
    _decode(engine, 1, 16, 8, vocabulary, how)  # everything once
    for count in streams:
        rows = _decode(engine, count, options.context, options.new, vocabulary, how)
        context = options.context + options.new / 2
        report["decode"].append(_decode_figures(rows, count, context, demand, ceilings))
    for length in [int(text) for text in options.prefill.split(",") if text]:
        seconds = min(_prefill(engine, length, vocabulary) for _ in range(3))
        report["prefill"].append(_prefill_figures(seconds, length, demand, ceilings))
    return report


def _decode_figures(
    rows: list[tuple[float, float]], count: int, context: float, demand: Demand, ceilings: Ceilings
) -> dict[str, float]:
    # Of the experts, those that at least one stream is expected to choose.
    experts = demand.expert_bytes * (1 - (1 - demand.chosen) ** count)
    moved = demand.read_bytes + experts + count * context * demand.kv_bytes
    floor_s = moved / ceilings.copy_bytes_per_s
    step_s = statistics.median(step for step, _ in rows)
    total, idle = sum(step for step, _ in rows), sum(host for _, host in rows)
    return {
        "streams": count,
        "context": context,
        "tokens_per_s": round(count * len(rows) / total, 1),
        "step_ms": round(1e3 * step_s, 3),
        "floor_ms": round(1e3 * floor_s, 3),
        "of_floor": round(floor_s / step_s, 3),
        "idle_share": round(idle / total, 3),
    }


def _prefill_figures(
    seconds: float, length: int, demand: Demand, ceilings: Ceilings
) -> dict[str, float]:
    flops = length * demand.token_flops + length * length / 2 * demand.pair_flops
    return {
        "tokens": length,
        "seconds": round(seconds, 4),
        "tokens_per_s": round(length / seconds),
        "tflops": round(flops / seconds / 1e12, 1),
        "of_matmul": round(flops / seconds / ceilings.flops, 3),
    }


def ceilings_of(backend: Backend, dtype: torch.dtype) -> Ceilings:
    """A large copy, reading and writing counted, and a large product of random matrices."""
    device = backend.device
    size, side = (1 << 30, 8192) if backend.full_steps_are_cheap else (1 << 26, 1024)
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    copying = _seconds(backend, lambda: target.copy_(source))
    left, right = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    multiplying = _seconds(backend, lambda: left @ right)
    return Ceilings(2 * size / copying, 2 * side**3 / multiplying)


def demand_of(model: PreTrainedModel, token_bytes: int) -> Demand:
    """Counted from the model's own weights."""
    text = model.config.get_text_config()
    inputs: Any = getattr(model.get_input_embeddings(), "weight", None)  # packed: read by rows
    head = weight_of(model.get_output_embeddings())
    assert head is not None
    tied = isinstance(head, PlainWeight) and head.tensor is inputs
    held = {p.data_ptr(): p for p in model.parameters()}
    read = [p for p in held.values() if p is not inputs or tied]
    plain = sum(p.numel() for p in read if p.dim() < _EXPERT_DIMS)
    plain_experts = sum(p.numel() for p in read if p.dim() == _EXPERT_DIMS)
    of_experts = [m for m in model.modules() if isinstance(m, PackedExperts)]
    packed_experts = _packed(of_experts)
    table = model.get_input_embeddings()
    looked_up_only = isinstance(table, PackedEmbedding) and table.table is not head
    apart = _packed([table] if looked_up_only else [])
    elsewhere = zip(_packed([model]), packed_experts, apart, strict=True)
    packed = tuple(whole - experts - looked_up for whole, experts, looked_up in elsewhere)
    size, experts = plain + packed[0], plain_experts + packed_experts[0]
    chosen = text.num_experts_per_tok / text.num_experts if experts else 0.0
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Demand(
        read_bytes=plain * model.dtype.itemsize + packed[1],
        expert_bytes=plain_experts * model.dtype.itemsize + packed_experts[1],
        chosen=chosen,
        kv_bytes=token_bytes,
        token_flops=2.0 * (size - math.prod(head.shape) + chosen * experts),
        pair_flops=4.0 * heads * head_dim * text.num_hidden_layers,
    )


def _packed(within: Iterable[nn.Module]) -> tuple[int, int]:
    """How many weights are packed there, and in how many bytes."""
    found = [m for part in within for m in part.modules() if isinstance(m, LinearWeight)]
    numbers = sum(math.prod(weight.shape) for weight in found)
    return numbers, sum(b.nbytes for weight in found for b in weight.buffers())


def _seconds(backend: Backend, act: Any) -> float:
    times = []
    for _ in range(12):
        backend.synchronize()
        started = time.perf_counter()
        for _ in range(5):
            act()
        backend.synchronize()
        times.append((time.perf_counter() - started) / 5)
    return statistics.median(times[2:])


def _prompt(length: int, vocabulary: int) -> list[int]:
    """A new one each time: KV of an earlier one would be found again."""
    return random.Random(next(_seeds)).choices(range(vocabulary), k=length)


def _decode(
    engine: GenerateEngine, count: int, context: int, new: int, vocabulary: int, how: Sampling
) -> list[tuple[float, float]]:
    """Seconds and idle seconds of every step in which all streams decode and nothing else runs."""
    for number in range(count):
        engine.submit(Submit(number, _prompt(context, vocabulary), new, how))
    rows = []
    while engine.has_work():
        before = time.perf_counter()
        engine.step()
        status = engine.status()
        if status.step_tokens == count and status.waiting == 0 and status.running == count:
            rows.append((time.perf_counter() - before, status.host_s))
    return rows[2:-2]


def _prefill(engine: GenerateEngine, length: int, vocabulary: int) -> float:
    engine.submit(Submit(0, _prompt(length, vocabulary), 1, _GREEDY))
    started = time.perf_counter()
    while engine.has_work():
        engine.step()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
