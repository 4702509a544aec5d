"""The engine against plain transformers: same model, same type, alternating rounds.

    python -m benchmarks.engine [--model FOLDER] [--rounds 3]

Peers: `generate` (greedy, its own cache, the prompts as one padded batch) for decoding, and one
forward of the whole prompt for prefill. Each side is a process of its own, in the environment that
its user gives it: ours has a worker's, the peer's is plain. One computes while the other waits.
Rounds alternate so that a noisy machine hits both alike; each figure is the best round, and the
ratio of the medians is told beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.report import record, starter_folder
from penstock.server.processes.fork_server_client import WORKER_ENVIRONMENT
from penstock.wire import LoadSpec, Sampling, Submit

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = 200
NEW = 48


class Side:
    """One of the two, in a process of its own: a line asks, a line answers."""

    def __init__(self, name: str, folder: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "--side", name, "--model", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def measure(self, what: str, size: int) -> list[float]:
        """Tokens per second, and whatever else it has to say."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what} {size}\n")
        self._process.stdin.flush()
        figures: list[float] = json.loads(self._process.stdout.readline())
        return figures

    def end(self) -> None:
        """No more questions."""
        self._process.communicate()


def main() -> None:
    """Measure decode of 1 and 8 streams, prefill of 512 and 1,500 tokens, and the host's share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.model or starter_folder()
    if options.side:
        _answer(_ours(folder) if options.side == "ours" else _theirs(folder))
        return
    plain = {name: value for name, value in os.environ.items() if name not in WORKER_ENVIRONMENT}
    ours = Side("ours", folder, {**plain, **WORKER_ENVIRONMENT})
    theirs = Side("theirs", folder, plain)
    figures: dict[str, Any] = {}
    for what, size, rounds in (
        *(("decode", streams, options.rounds) for streams in (1, 8)),
        *(("prefill", tokens, 3 * options.rounds) for tokens in (512, 1500)),
    ):
        for side in (ours, theirs):
            side.measure(what, size)  # warms up, and neither side begins before both are loaded
        pairs = [(ours.measure(what, size), theirs.measure(what, size)) for _ in range(rounds)]
        found = _compare([pair[0][0] for pair in pairs], [pair[1][0] for pair in pairs])
        if what == "decode":
            found["host_ms_per_step"] = round(min(pair[0][1] for pair in pairs), 2)
        figures[f"{what}_{size}"] = found
    ours.end()
    theirs.end()
    record("engine", figures)


def _compare(ours: list[float], theirs: list[float]) -> dict[str, float]:
    return {
        "tokens_per_s": round(max(ours), 1),
        "transformers": round(max(theirs), 1),
        "ratio": round(max(ours) / max(theirs), 2),
        "ratio_of_medians": round(statistics.median(ours) / statistics.median(theirs), 2),
    }


def _answer(measure: Callable[[str, int], list[float]]) -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries print what they like
    for line in sys.stdin:
        what, size = line.split()
        os.write(answers, json.dumps(measure(what, int(size))).encode() + b"\n")


def _ours(folder: Path) -> Callable[[str, int], list[float]]:
    from penstock.worker.loading import load

    spec = LoadSpec(folder.name, str(folder), "cpu", "float32", memory_bytes=2 << 30)
    engine, context = load(spec, lambda *_: None)
    vocabulary = context.vocabulary

    def measure(what: str, size: int) -> list[float]:
        if what == "decode":
            return list(_our_decode(engine, prompts(size, PROMPT, vocabulary)))
        return [_our_prefill(engine, prompts(1, size, vocabulary)[0])]

    return measure


def _theirs(folder: Path) -> Callable[[str, int], list[float]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def measure(what: str, size: int) -> list[float]:
        if what == "decode":
            return [_their_decode(model, prompts(size, PROMPT, model.config.vocab_size))]
        return [_their_prefill(model, prompts(1, size, model.config.vocab_size)[0])]

    return measure


def prompts(count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Random prompts, the same at every call."""
    chance = random.Random(count)
    return [[chance.randrange(100, vocabulary) for _ in range(tokens)] for _ in range(count)]


def _unknown(number: int, prompt: list[int], new: int) -> Submit:
    """A request whose KV is computed, though an earlier one had the same prompt."""
    return Submit(number, list(prompt), new, Sampling(temperature=0), salt=os.urandom(8))


def _our_decode(engine: Any, batch: list[list[int]]) -> tuple[float, float]:
    """Tokens per second once every stream decodes; milliseconds of a step outside the forward."""
    for number, prompt in enumerate(batch):
        engine.submit(_unknown(number, prompt, NEW))
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
    engine.submit(_unknown(0, prompt, 1))
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
