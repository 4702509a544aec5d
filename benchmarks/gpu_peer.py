"""transformers' continuous batching, as it comes, on the shape and load that the server has.

    python -m benchmarks.gpu_peer [--requests 256] [--seconds 100]

128 requests at a time, 512 tokens in and 128 out. It ends after `--seconds`; what counts are the
requests that were finished by then, over the time at which the last of them was.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from benchmarks.report import record
from penstock import shapes


def main() -> None:
    """Build the model, run the load, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="random:qwen3-8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=100)
    options = parser.parse_args()
    model = _model(options.shape, options.device)
    settings = GenerationConfig(
        max_new_tokens=options.output, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    with model.continuous_batching_context_manager(
        generation_config=settings, block=True, timeout=10
    ) as manager:
        ended = _load(manager, options, model.config.vocab_size)
        # What is unfinished would hold up the end.
        for number in range(options.requests):
            manager.cancel_request(str(number))
    tokens, seconds = sum(count for count, _ in ended), max((at for _, at in ended), default=0.0)
    record(
        "gpu_peer",
        {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "shape": options.shape,
            "clients": options.clients,
            "finished_requests": len(ended),
            "input_tokens": options.input,
            "output_tokens": options.output,
            "seconds": round(seconds, 2),
            "output_tokens_per_s": round(tokens / seconds, 1) if ended else 0.0,
        },
    )


def _model(shape: str, device: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        shapes.write_folder(shape, Path(folder))
        config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(shapes.RANDOM_SEED)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()


def _load(manager: Any, options: argparse.Namespace, vocabulary: int) -> list[tuple[int, float]]:
    """Tokens of each finished request, and when it was."""
    numbers = iter(range(options.requests))
    started = time.perf_counter()

    def submit() -> None:
        number = next(numbers, None)
        if number is not None:
            prompt = random.Random(number).choices(range(vocabulary), k=options.input)
            manager.add_request(
                prompt,
                request_id=str(number),
                max_new_tokens=options.output,
                eos_token_id=-1,
            )

    for _ in range(options.clients):
        submit()
    ended: list[tuple[int, float]] = []
    while len(ended) < options.requests:
        left = options.seconds - (time.perf_counter() - started)
        if left <= 0 or not manager.is_running():
            break
        result = manager.get_result(timeout=min(left, 1.0))
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(result.error)
            ended.append((len(result.generated_tokens), time.perf_counter() - started))
            submit()
    return ended


if __name__ == "__main__":
    main()
