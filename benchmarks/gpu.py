"""Every figure of benchmarks/gpu.md, in one go or a few parts at a time.

    python -m benchmarks.gpu [decode] [kernels] [long] [experts] [serve] [peer] [memory] [tiers]

decode    one, 32 and 128 streams at 512 tokens of context; prompts of 4k, 16k and 32k tokens
kernels   where a step of one, 32 and 128 streams goes
long      8 streams at 64k, on the same shape with a wider window
experts   one and 64 streams of the mixture-of-experts shape
serve     loading twice, without and with a stored profile; one client, then 128, through HTTP
peer      transformers' continuous batching under the load of `serve`
memory    a nearly full card and a neighbour on it
tiers     a long prefix computed, from RAM and from disk

Each part is a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.serving import wait_until_ready

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "random:qwen3-8b"
PORT = 8011
_URL = f"http://127.0.0.1:{PORT}"


def decode() -> None:
    """Against what the device can do."""
    _engine(MODEL, "--streams", "1,32,128", "--prefill", "4096,16384,32768")


def kernels() -> None:
    """By torch's profiler."""
    _run(sys.executable, "-m", "benchmarks.gpu_kernels")


def long() -> None:
    """KV of 72 GiB. The first stream has decoded 224 tokens when the last has read its prompt."""
    contexts = ["--streams", "8", "--context", "65472", "--new", "512"]
    _engine("random:qwen3-8b-128k", *contexts, "--memory", "84GiB")


def experts() -> None:
    """128 experts, of which a token sees 8."""
    _engine("random:qwen3-30b-a3b", "--streams", "1,64", "--memory", "20GiB")


def serve() -> None:
    """Ready times are in the server's own log lines."""
    with tempfile.TemporaryDirectory() as home:
        with _server(Path(home)):
            pass  # measures and stores its profile
        with _server(Path(home)):
            _clients(1, 4, 512, 128)
            _clients(128, 512, 512, 128)
            _clients(128, 512, 128, 512)


def peer() -> None:
    """Bounded in time: it is slow."""
    _run(sys.executable, "-m", "benchmarks.gpu_peer")


def memory() -> None:
    """300 requests."""
    _run(sys.executable, "-m", "benchmarks.gpu_memory")


def tiers() -> None:
    """With so little memory that a prefix is pushed out."""
    _run(sys.executable, "-m", "benchmarks.gpu_tiers")


_ALL = (decode, kernels, long, experts, serve, peer, memory, tiers)
_PARTS = {part.__name__: part for part in _ALL}


def main() -> None:
    """Run the parts that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="all, if none is named")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(_PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    for name in options.parts or _PARTS:
        started = time.perf_counter()
        print(f"--- {name}", flush=True)
        _PARTS[name]()
        print(f"--- {name} took {time.perf_counter() - started:.0f} s", flush=True)


def _run(*command: str) -> None:
    # A part that fails does not keep the others from being measured.
    code = subprocess.run(command, check=False).returncode
    if code:
        print(f"--- ended with {code}", flush=True)


def _engine(model: str, *flags: str) -> None:
    _run(sys.executable, "-m", "penstock", "bench", "engine", "--model", model, *flags)


def _clients(clients: int, requests: int, prompt: int, output: int) -> None:
    flags = {"clients": clients, "requests": requests, "input": prompt, "output": output}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "penstock", "bench", "serve", "--url", _URL]
    _run(*command, "--model", MODEL, *words)


@contextlib.contextmanager
def _server(home: Path) -> Iterator[None]:
    """Ready at the beginning of the block, ended at its end."""
    command = [sys.executable, "-m", "penstock", "serve", "--model", MODEL, "--device", "cuda"]
    command += ["--port", str(PORT), "--memory", "90%"]
    log = (home / "server.log").open("wb")
    # Compiled kernels are kept in the home too: the first start is one on a new machine.
    own = {"PENSTOCK_HOME": str(home), "TRITON_CACHE_DIR": str(home / "triton")}
    process = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=log)
    try:
        wait_until_ready(_URL, process)
        yield
    finally:
        process.terminate()
        process.wait(60)
        log.close()
        for file in (home / "server.log", *(home / "logs").glob("*.log")):
            lines = file.read_text(errors="replace").splitlines()
            told = [line for line in lines if " is ready on " in line or "profile took" in line]
            print("\n".join(told), flush=True)


if __name__ == "__main__":
    main()
