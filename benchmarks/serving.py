"""The whole server over real sockets, against plain transformers and against itself at rest.

    python -m benchmarks.serving [throughput] [pacing] [streams] [tokenising]

throughput   8 streams through HTTP; the peer is `generate` on the same 8 prompts as one batch.
pacing       time between tokens of a running stream, alone and while another prompt of 1,500
             tokens is prefilled, with a step-time target set.
streams      64 streams at once, each compared with the same request sent alone.
tokenising   time between tokens while a body of 400,000 tokens is tokenised and refused, and not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks.report import STARTER, median, percentile, record, starter_folder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

STEP_TARGET_S = 0.15
NEW = 48
ROUNDS = 8


@contextlib.contextmanager
def server(**settings: Any) -> Iterator[str]:
    """`penstock serve` on a free port, ready; ended at the end of the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "penstock.toml"
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
        config.write_text(f'[models."{STARTER}"]\n{lines}\n')
        command = [sys.executable, "-m", "penstock", "serve", "--model", STARTER]
        process = subprocess.Popen(
            [*command, "--port", str(port), "--config", str(config)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, process)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/admin/api/models").text.find('"ready"') >= 0:
                return
        if process.poll() is not None:
            sys.exit(f"the server ended with {process.returncode}")
        time.sleep(0.2)
    sys.exit("the server was not ready within 120 s")


async def stream(client: httpx.AsyncClient, prompt: str, new: int) -> tuple[str, list[float]]:
    """The text of one greedy completion, and when each token arrived."""
    text, times = "", []
    async for piece in _pieces(client, prompt, new):
        text += piece
        times.append(time.perf_counter())
    return text, times


async def _pieces(client: httpx.AsyncClient, prompt: str, new: int) -> AsyncIterator[str]:
    body = {
        "model": STARTER,
        "prompt": prompt,
        "max_tokens": new,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                yield event["choices"][0]["text"]


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))


def _gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


_WORDS = (
    "river",
    "carries",
    "water",
    "down",
    "mill",
    "turns",
    "wheel",
    "by",
    "day",
    "night",
    "and",
)


def _words(count: int, salt: int) -> str:
    step = salt % 7 + 1
    return f"{salt}: " + " ".join(_WORDS[(salt + i * step) % len(_WORDS)] for i in range(count))


@contextlib.asynccontextmanager
async def _running_stream(client: httpx.AsyncClient) -> AsyncIterator[list[float]]:
    """A stream that decodes throughout the block; when its tokens arrived so far."""
    times: list[float] = []

    async def follow() -> None:
        async for _ in _pieces(client, _words(100, 1), 1000):
            times.append(time.perf_counter())  # noqa: PERF401 - read while it grows

    task = asyncio.create_task(follow())
    await asyncio.sleep(2)
    try:
        yield times
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def throughput(url: str) -> dict[str, Any]:
    """Tokens per second of 8 streams, from the first request to the last token."""
    async with _client(url) as client:
        await stream(client, _words(20, 0), 4)
        started = time.perf_counter()
        answers = await asyncio.gather(*(stream(client, _words(190, i), NEW) for i in range(8)))
        ended = time.perf_counter()
    tokens = sum(len(times) for _, times in answers)
    return {"tokens_per_s": round(tokens / (ended - started), 1), "tokens": tokens}


def throughput_of_transformers() -> float:
    """`generate` on 8 prompts of 200 tokens as one batch, in a process of its own."""
    code = (
        "import time, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "from benchmarks.engine import generate, prompts\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(starter_folder())!r}, "
        "dtype=torch.float32)\n"
        "batch = prompts(8, 200, model.config.vocab_size)\n"
        f"print('seconds', min(generate(model, batch, {NEW}) for _ in range(3)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    return 8 * NEW / float(done.stdout.split("seconds")[1])


async def pacing(url: str) -> dict[str, Any]:
    """Gaps of one stream alone, and during a prefill of 1,500 tokens by another."""
    async with _client(url) as client:
        _, times = await stream(client, _words(100, 1), 80)
        alone = _gaps(times[2:])
        async with _running_stream(client) as running:
            # Twice: the first prefill teaches the pacer, the second is measured.
            await stream(client, _words(1400, 2), 1)
            started = time.perf_counter()
            await stream(client, _words(1400, 3), 1)
            ended = time.perf_counter()
    during = _gaps([at for at in running if started <= at <= ended])
    return {
        "target_ms": 1e3 * STEP_TARGET_S,
        "alone_p50_ms": round(1e3 * median(alone), 1),
        "alone_p99_ms": round(1e3 * percentile(alone, 0.99), 1),
        "during_prefill_p50_ms": round(1e3 * median(during), 1),
        "during_prefill_p99_ms": round(1e3 * percentile(during, 0.99), 1),
        "p99_over_target": round(percentile(during, 0.99) / STEP_TARGET_S, 2),
        "gaps_measured": len(during),
        "prefill_s": round(ended - started, 1),
    }


async def streams(url: str) -> dict[str, Any]:
    """64 streams at once give what each gives alone."""
    prompts = [_words(10 + 3 * (i % 20), i) for i in range(64)]
    async with _client(url) as client:
        started = time.perf_counter()
        together = await asyncio.gather(*(stream(client, prompt, 24) for prompt in prompts))
        seconds = time.perf_counter() - started
        alone = [(await stream(client, prompt, 24))[0] for prompt in prompts[::4]]
    same = sum(text == other for (text, _), other in zip(together[::4], alone, strict=True))
    return {
        "finished": sum(len(times) > 0 for _, times in together),
        "compared": len(alone),
        "equal_to_alone": same,
        "tokens_per_s": round(64 * 24 / seconds, 1),
    }


async def tokenising(url: str) -> dict[str, Any]:
    """The worst gap of a stream while a huge prompt is tokenised, and in the same time without.

    Rounds of both alternate, since the machine itself causes gaps now and then.
    """
    # 400,000 tokens: a space and a digit are two. Words would be refused by their bytes alone.
    prompt = "".join(f" {i % 10}" for i in range(200_000))
    body = json.dumps({"model": STARTER, "prompt": prompt, "max_tokens": 1}).encode()
    usual: list[list[float]] = []
    during: list[list[float]] = []
    took: list[float] = []
    async with _client(url) as client:
        for _ in range(ROUNDS):
            async with _poster(url, body) as poster, _running_stream(client) as running:
                assert poster.stdin is not None
                assert poster.stdout is not None
                started = time.perf_counter()
                poster.stdin.write(b"go\n")
                refused = int(await poster.stdout.readline())
                ended = time.perf_counter()
                during.append(_gaps([at for at in running if started <= at <= ended]))
                took.append(ended - started)
                await asyncio.sleep(0.5)
                started = time.perf_counter()
                await asyncio.sleep(took[-1])
                usual.append(_gaps([at for at in running if at >= started]))
    worst_usual, worst_during = ([max(gaps) for gaps in windows] for windows in (usual, during))
    return {
        "status": refused,
        "rounds": ROUNDS,
        "refusal_s": round(median(took), 2),
        "usual_p50_ms": _ms(median([gap for gaps in usual for gap in gaps])),
        "during_p50_ms": _ms(median([gap for gaps in during for gap in gaps])),
        "usual_p99_ms": _ms(percentile([gap for gaps in usual for gap in gaps], 0.99)),
        "during_p99_ms": _ms(percentile([gap for gaps in during for gap in gaps], 0.99)),
        "usual_worst_ms": [_ms(gap) for gap in worst_usual],
        "during_worst_ms": [_ms(gap) for gap in worst_during],
        "typical_worst_over_usual_ms": _ms(median(worst_during) - median(worst_usual)),
        "worst_over_usual_ms": _ms(max(worst_during) - max(worst_usual)),
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


@contextlib.asynccontextmanager
async def _poster(url: str, body: bytes) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that holds the body and posts it on a word; sending must not delay our clock."""
    code = (
        "import sys, httpx\n"
        "size = int(sys.stdin.buffer.readline())\n"
        "body = sys.stdin.buffer.read(size)\n"
        "client = httpx.Client(timeout=120)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.buffer.readline()\n"
        "print(client.post(sys.argv[1], content=body).status_code, flush=True)\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        f"{url}/v1/completions",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"%d\n" % len(body) + body)
    await process.stdout.readline()
    yield process
    await process.wait()


def main() -> None:
    """Run the chosen parts, each on a server of its own."""
    parts = {"throughput": throughput, "pacing": pacing, "streams": streams}
    parts["tokenising"] = tokenising
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *parts], default=list(parts))
    for name in parser.parse_args().parts or list(parts):
        settings = {"step_target_s": STEP_TARGET_S} if name == "pacing" else {}
        with server(**settings) as url:
            figures = asyncio.run(parts[name](url))
        if name == "throughput":
            peer = throughput_of_transformers()
            figures |= {"transformers": round(peer, 1)}
            figures["ratio"] = round(figures["tokens_per_s"] / peer, 2)
        record(f"serving.{name}", figures)


if __name__ == "__main__":
    main()
