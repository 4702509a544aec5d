"""Two servers under 8 clients at once: ours and `llama_cpp.server`, in turn, on the same file."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from penstock.testing.served import served

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIENTS, NEW = 8, 64
_READY_S = 120.0
_SENTENCE = "The river carries water down to the mill and turns its wheel."


def compare(peer: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Tokens a second of all clients together, and how many streams were cut short."""
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (temporary / "models").mkdir()
        (temporary / "models" / folder.name).symlink_to(folder.resolve())
        log = temporary / "log"
        flags = f"--model={folder.name}", "--memory=4GiB"
        ours = stack.enter_context(served(temporary, log, *flags)).url
        theirs = stack.enter_context(_llama_server(peer, folder))
        # Theirs has no way to go on behind the end of an answer: it is asked to count.
        found: dict[str, list[tuple[float, int]]] = {ours: [], theirs: []}
        for number in range(rounds + 1):
            for url, values in found.items():
                value = asyncio.run(_load(url, folder.name, number))
                if number:  # the first warms up
                    values.append(value)
    own, other = ([rate for rate, _ in found[url]] for url in (ours, theirs))
    medians = statistics.median(own), statistics.median(other)
    return {
        "model": folder.name,
        "ours tokens/s": round(medians[0], 1),
        "ours from to": f"{min(own):.1f} to {max(own):.1f}",
        "llama_cpp.server tokens/s": round(medians[1], 1),
        "llama_cpp.server from to": f"{min(other):.1f} to {max(other):.1f}",
        "ratio": round(medians[0] / medians[1], 2),
        "ours cut short": sum(short for _, short in found[ours]),
        "llama_cpp.server cut short": sum(short for _, short in found[theirs]),
    }


@contextlib.contextmanager
def _llama_server(peer: str, folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [peer, "-m", "llama_cpp.server", "--model", str(next(folder.glob("*.gguf")))]
    # By default a new request ends the stream of another.
    flags = ["--port", str(port), "--n_ctx", "2048", "--interrupt_requests", "false"]
    nowhere = subprocess.DEVNULL
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen([*command, *flags], stdout=nowhere, stderr=nowhere, env=plain) as process:
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _READY_S
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    httpx.get(f"{url}/v1/models").raise_for_status()
                    break
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError("llama_cpp.server did not start")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


async def _load(url: str, model: str, number: int) -> tuple[float, int]:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        began = time.perf_counter()
        streams = (_stream(client, model, f"{number} {each}") for each in range(CLIENTS))
        counts = await asyncio.gather(*streams)
        seconds = time.perf_counter() - began
    return sum(counts) / seconds, sum(count < NEW for count in counts)


async def _stream(client: httpx.AsyncClient, model: str, salt: str) -> int:
    """Tokens of one answer. A token that both bar is the end of the text."""
    body = {
        "model": model,
        "prompt": f"{salt}: {_SENTENCE * 4} 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
        "max_tokens": NEW,
        "temperature": 0,
        "stream": True,
        "logit_bias": {"0": -100, "2": -100},
    }
    count = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return count
                choice = event["choices"][0]
                count += choice.get("finish_reason") is None or bool(choice["text"])
    return count
