"""How near an engine comes to what the device can do, measured in the same run.

    python -m penstock.worker.bench FOLDER --device cuda:0 --streams 1,32,128 --prefill 4096

The floor of a decode step is the time in which the device copies as many bytes as the step must
read: every weight but the input embedding once, and the KV of every stream. Prefill is compared
with a large matrix product in the model's type. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from penstock.wire import LoadSpec, Sampling, Submit
from penstock.worker.loading import load_engine

if TYPE_CHECKING:
    from penstock.worker.engine.generate import GenerateEngine

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
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--memory", type=int, default=32 << 30, help="bytes for KV and steps")
    parser.add_argument("--streams", default="1,32", help="decode with so many at once")
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt then")
    parser.add_argument("--new", type=int, default=128, help="tokens that each stream decodes")
    parser.add_argument("--prefill", default="", help="prompts of so many tokens")
    parser.add_argument("--step-tokens", type=int, help="otherwise 8192, or 1024 on a CPU")
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    streams = [int(text) for text in options.streams.split(",") if text]
    spec = LoadSpec(
        name=options.folder,
        path=options.folder,
        device=options.device,
        dtype=options.dtype,
        memory_bytes=options.memory,
        step_tokens=options.step_tokens or (8192 if options.device != "cpu" else 1024),
        step_sequences=max([*streams, 1]),
        capped=False,
    )
    started = time.perf_counter()
    engine = load_engine(spec, lambda *_: None)
    load_s = time.perf_counter() - started
    report = measure(engine, options, streams)
    report["load_s"] = round(load_s, 1)
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


def measure(
    engine: GenerateEngine, options: argparse.Namespace, streams: list[int]
) -> dict[str, Any]:
    """All figures."""
    device = torch.device(options.device)
    model = engine.model
    ceilings = ceilings_of(device, model.dtype)
    demand = demand_of(engine)
    how = Sampling(temperature=options.temperature, seed=1) if options.temperature else _GREEDY
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "dtype": str(model.dtype).removeprefix("torch."),
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
        # Of the experts, those that at least one stream is expected to choose.
        experts = demand.expert_bytes * (1 - (1 - demand.chosen) ** count)
        moved = demand.read_bytes + experts + count * context * demand.kv_bytes
        floor_s = moved / ceilings.copy_bytes_per_s
        step_s = statistics.median(step for step, _ in rows)
        total, idle = sum(step for step, _ in rows), sum(host for _, host in rows)
        report["decode"].append(
            {
                "streams": count,
                "context": context,
                "tokens_per_s": round(count * len(rows) / total, 1),
                "step_ms": round(1e3 * step_s, 3),
                "floor_ms": round(1e3 * floor_s, 3),
                "of_floor": round(floor_s / step_s, 3),
                "idle_share": round(idle / total, 3),
            }
        )
    for length in [int(text) for text in options.prefill.split(",") if text]:
        seconds = min(_prefill(engine, length, vocabulary) for _ in range(3))
        flops = length * demand.token_flops + length * length / 2 * demand.pair_flops
        report["prefill"].append(
            {
                "tokens": length,
                "seconds": round(seconds, 4),
                "tokens_per_s": round(length / seconds),
                "tflops": round(flops / seconds / 1e12, 1),
                "of_matmul": round(flops / seconds / ceilings.flops, 3),
            }
        )
    return report


def ceilings_of(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """A large copy, reading and writing counted, and a large product of random matrices."""
    size = 1 << 30 if device.type == "cuda" else 1 << 26
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    copying = _seconds(device, lambda: target.copy_(source))
    side = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    multiplying = _seconds(device, lambda: left @ right)
    return Ceilings(2 * size / copying, 2 * side**3 / multiplying)


def demand_of(engine: GenerateEngine) -> Demand:
    """Counted from the model's own weights."""
    model = engine.model
    text = model.config.get_text_config()
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    held = {p.data_ptr(): p for p in model.parameters()}
    read = [p for p in held.values() if p is not inputs or inputs is outputs]
    size = sum(p.numel() for p in read if p.dim() < _EXPERT_DIMS)
    experts = sum(p.numel() for p in read if p.dim() == _EXPERT_DIMS)
    chosen = text.num_experts_per_tok / text.num_experts if experts else 0.0
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Demand(
        read_bytes=size * model.dtype.itemsize,
        expert_bytes=experts * model.dtype.itemsize,
        chosen=chosen,
        kv_bytes=engine.ready().kv_bytes_per_token,
        token_flops=2.0 * (size - outputs.numel() + chosen * experts),
        pair_flops=4.0 * heads * head_dim * text.num_hidden_layers,
    )


def _seconds(device: torch.device, act: Any) -> float:
    times = []
    for _ in range(12):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(5):
            act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
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
