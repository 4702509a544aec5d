"""The side of `benchmarks.cpu_peer` that is llama-cpp-python: a line asks, a line answers.

    PYTHON benchmarks/cpu_peer_llama.py FILE.gguf THREADS

Run by the Python that has llama-cpp-python, which needs nothing of ours. Its C interface is called
directly, so that Python's share is a few calls a step.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTEXT, PROMPT, STREAMS = 4096, 200, 8
_WARM_STEPS = 4


def resident_bytes() -> int:
    """Of this process, pages of files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peer:
    """One model with a context for all that is asked."""

    def __init__(self, file: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self.base_bytes = resident_bytes()
        settings = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), settings)
        how = llama_cpp.llama_context_default_params()
        how.n_ctx, how.n_batch, how.n_ubatch = CONTEXT, 2048, 512
        how.n_seq_max, how.kv_unified = STREAMS, True
        how.n_threads = how.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, how)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocabulary: int = llama_cpp.llama_vocab_n_tokens(vocabulary)
        chain = llama_cpp.llama_sampler_chain_default_params()
        self._sampler = llama_cpp.llama_sampler_chain_init(chain)
        llama_cpp.llama_sampler_chain_add(self._sampler, llama_cpp.llama_sampler_init_greedy())
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def measure(self, what: str, size: int, new: int) -> float:
        """Tokens a second, or resident bytes beside the process's base."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        chance = random.Random(size)
        if what == "resident":
            return resident_bytes() - self.base_bytes
        if what == "base":
            return self.base_bytes
        if what == "prefill":
            prompt = [chance.randrange(100, self._vocabulary) for _ in range(size)]
            began = time.perf_counter()
            self._decode([(token, at, 0) for at, token in enumerate(prompt)], [size - 1])
            self._next(size - 1)
            return size / (time.perf_counter() - began)
        return self._streams(size, new, chance)

    def _streams(self, streams: int, new: int, chance: random.Random) -> float:
        tokens = []
        for stream in range(streams):
            prompt = [chance.randrange(100, self._vocabulary) for _ in range(PROMPT)]
            rows = [(token, at, stream) for at, token in enumerate(prompt)]
            self._decode(rows, [PROMPT - 1])
            tokens.append(self._next(PROMPT - 1))
        began = 0.0
        for step in range(new):
            if step == _WARM_STEPS:
                began = time.perf_counter()
            rows = [(token, PROMPT + step, stream) for stream, token in enumerate(tokens)]
            self._decode(rows, range(streams))
            tokens = [self._next(row) for row in range(streams)]
        return (new - _WARM_STEPS) * streams / (time.perf_counter() - began)

    def _decode(self, rows: Sequence[tuple[int, int, int]], wanted: Sequence[int]) -> None:
        batch: Any = self._batch
        batch.n_tokens = len(rows)
        for number, (token, position, stream) in enumerate(rows):
            batch.token[number], batch.pos[number] = token, position
            batch.n_seq_id[number], batch.seq_id[number][0] = 1, stream
            batch.logits[number] = False
        for number in wanted:
            batch.logits[number] = True
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: {code}")

    def _next(self, row: int) -> int:
        token: int = llama_cpp.llama_sampler_sample(self._sampler, self._context, row)
        return token


def main() -> None:
    """Answer until nothing is asked any more."""
    answers = os.dup(1)
    os.dup2(2, 1)  # the library prints what it likes
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p())
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    about = llama_cpp.llama_print_system_info().decode()
    os.write(answers, json.dumps([llama_cpp.__version__, about]).encode() + b"\n")
    for line in sys.stdin:
        what, size, new = line.split()
        os.write(answers, json.dumps(peer.measure(what, int(size), int(new))).encode() + b"\n")


if __name__ == "__main__":
    main()
