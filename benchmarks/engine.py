"""The engine against plain transformers, same model, same type, same process, alternating rounds.

    python -m benchmarks.engine [--model FOLDER] [--rounds 3]

Peers: `generate` (greedy, its own cache, the prompts as one padded batch) for decoding, and one
forward of the whole prompt for prefill. Rounds alternate so that a noisy machine hits both alike;
each figure is the best round.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.report import record, starter_folder
from penstock.wire import LoadSpec, Sampling, Submit
from penstock.worker.loading import load_engine

PROMPT = 200
NEW = 48


def main() -> None:
    """Measure decode of 1 and 8 streams, prefill of 512 and 1,500 tokens, and the host's share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    folder = options.model or starter_folder()
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    spec = LoadSpec(folder.name, str(folder), "cpu", "float32", memory_bytes=2 << 30)
    engine = load_engine(spec, lambda *_: None)
    figures: dict[str, Any] = {}
    for streams in (1, 8):
        batch = prompts(streams, PROMPT, peer.config.vocab_size)
        ours, theirs, host = [], [], []
        for _ in range(options.rounds):
            rate, host_ms = _our_decode(engine, batch)
            ours.append(rate)
            host.append(host_ms)
            theirs.append(_their_decode(peer, batch))
        figures[f"decode_{streams}"] = _compare(ours, theirs)
        figures[f"decode_{streams}"]["host_ms_per_step"] = round(min(host), 2)
    for tokens in (512, 1500):
        (prompt,) = prompts(1, tokens, peer.config.vocab_size)
        ours, theirs = [], []
        for _ in range(2 * options.rounds):
            ours.append(_our_prefill(engine, prompt))
            theirs.append(_their_prefill(peer, prompt))
        figures[f"prefill_{tokens}"] = _compare(ours, theirs)
    record("engine", figures)


def _compare(ours: list[float], theirs: list[float]) -> dict[str, float]:
    return {
        "tokens_per_s": round(max(ours), 1),
        "transformers": round(max(theirs), 1),
        "ratio": round(max(ours) / max(theirs), 2),
    }


def prompts(count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Random prompts, the same at every call."""
    chance = random.Random(count)
    return [[chance.randrange(100, vocabulary) for _ in range(tokens)] for _ in range(count)]


def _our_decode(engine: Any, batch: list[list[int]]) -> tuple[float, float]:
    """Tokens per second once every stream decodes; milliseconds of a step outside the forward."""
    for number, prompt in enumerate(batch):
        engine.submit(Submit(number, list(prompt), NEW, Sampling(temperature=0)))
    tokens, seconds, host = 0, 0.0, []
    while engine.has_work():
        started = time.perf_counter()
        outputs = engine.step()
        elapsed = time.perf_counter() - started
        status = engine.status()
        if status.step_tokens == len(batch):
            tokens += sum(len(output.tokens) for output in outputs)
            seconds += elapsed
            host.append(status.host_s)
    return tokens / seconds, 1e3 * sorted(host)[len(host) // 2]


def _their_decode(model: Any, batch: list[list[int]]) -> float:
    """The same from `generate`: a long run less the run that only prefills."""
    seconds = generate(model, batch, NEW) - generate(model, batch, 1)
    return (NEW - 1) * len(batch) / seconds


def generate(model: Any, batch: list[list[int]], new: int) -> float:
    """Seconds that transformers takes for `new` greedy tokens to each prompt."""
    ids = torch.tensor(batch)
    started = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
    )
    return time.perf_counter() - started


def _our_prefill(engine: Any, prompt: list[int]) -> float:
    engine.submit(Submit(0, list(prompt), 1, Sampling(temperature=0)))
    started = time.perf_counter()
    while engine.has_work():
        engine.step()
    return len(prompt) / (time.perf_counter() - started)


@torch.inference_mode()
def _their_prefill(model: Any, prompt: list[int]) -> float:
    ids = torch.tensor([prompt])
    started = time.perf_counter()
    model(input_ids=ids, use_cache=True, logits_to_keep=1)
    return len(prompt) / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
