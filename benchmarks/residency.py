"""What models do to each other: memory that moves, an unload and a death beside a busy stream.

    python -m benchmarks.residency [elastic|busy|load|unload|death ...] [--rounds 5] [--device cuda]

elastic   two idle models with a large KV share a limit; each in turn gets a prompt for which the
          other must give pages: tokens of context before and after, and how long that took.
busy      two models decode at the same time, and one decodes while the other computes prompts: what
          each does, as a share of what it does alone.
load      a model is loaded while another decodes one stream: the gaps of that meanwhile and before,
          with the profile of an earlier load and without one, when it is measured.
unload    a model is unloaded while another decodes one stream and prefills prompts: how long it
          settled, and the longest gap of the stream beside it and before, in steps of that model.
death     a worker is killed in mid-stream while another streams: the other's gaps, what the
          victim's client read, and when the model answered again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks.report import median, record, starter_folder
from penstock import shapes
from penstock.testing.served import Served, served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
_salt = itertools.count(1)


def prompt(length: int) -> list[int]:
    """Token ids that begin like no other prompt's."""
    salt = next(_salt)
    return [10 + (salt * 7919 + i * (salt + 3)) % 400 for i in range(length)]


@contextlib.contextmanager
def home(*names: str, starter: bool) -> Iterator[Path]:
    """A home with one model under several names."""
    with tempfile.TemporaryDirectory() as directory:
        for name in names:
            folder = Path(directory) / "models" / name
            folder.mkdir(parents=True)
            if not starter:
                shapes.write_folder("random:big-kv", folder)
                continue
            for file in starter_folder().iterdir():
                if file.is_file():
                    (folder / file.name).symlink_to(file)
        yield Path(directory)


def ask(client: httpx.Client, model: str, tokens: list[int], new: int = 1) -> float:
    """Seconds for an answer of `new` tokens."""
    body = {"model": model, "prompt": tokens, "max_tokens": new, "temperature": 0}
    started = time.perf_counter()
    answer = client.post("/v1/completions", json={**body, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - started


def elastic(rounds: int, device: str) -> None:
    """Pages from one idle model to another and back."""
    memory = {"cpu": "1500MiB", "cuda": "8GiB"}[device]
    small = {"PENSTOCK_MODELS_STEP_TOKENS": "128", "PENSTOCK_MODELS_STEP_SEQUENCES": "32"}
    with (
        home("first", "second", starter=False) as folder,
        served(
            folder, folder / "log", f"--memory={memory}", "--device", device, environment=small
        ) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        for name in ("first", "second"):
            ask(client, name, prompt(20))
        # More than either has, less than both.
        length = int(0.7 * sum(server.row(name)["kv_tokens"] for name in ("first", "second")))
        took, was, has, other = [], [], [], []
        for name in ["first", "second"] * rounds:
            ask(client, name, prompt(length))
            grown = [row for row in server.get("/admin/api/events") if row["event"] == "kv grown"]
            rows = {row["name"]: row for row in server.get("/admin/api/models")}
            if grown and grown[-1]["model"] == name:
                latest, token = grown[-1], rows[name]["kv_bytes_per_token"]
                took.append(latest["took_s"])
                was.append(latest["was_bytes"] // token)
                has.append(latest["kv_bytes"] // token)
                (left,) = set(rows) - {name}
                other.append(rows[left]["kv_tokens"])
    record(
        "residency elastic",
        {
            "device": device,
            "prompt_tokens": length,
            "grown": f"{len(took)} of {2 * rounds}",
            "took_ms": [round(1000 * value, 1) for value in took],
            "tokens_before": was,
            "tokens_after": has,
            "left_to_the_other": other,
        },
    )


async def _stream(
    url: str, model: str, new: int, times: list[float] | None = None
) -> tuple[list[float], list[Any]]:
    """When each event of a stream came, and the last ones; `times` is where to note it."""
    times = [] if times is None else times
    last: list[Any] = []
    body = {"model": model, "prompt": prompt(20), "max_tokens": new, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    async with (
        httpx.AsyncClient(base_url=url, timeout=300) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                times.append(time.perf_counter())
                last = [*last[-2:], line[5:].strip()]
    return times, last


def _gaps(times: list[float], begin: float, end: float) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times) if begin <= b and a <= end]


async def _beside(server: Served, names: tuple[str, str], act: Any) -> dict[str, Any]:
    """A stream of the first and prompts for it, while `act` happens to the second."""
    busy, _ = names
    stream = asyncio.create_task(_stream(server.url, busy, 150))
    await asyncio.sleep(1.0)

    async def prefill() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            while not stream.done():
                body = {"model": busy, "prompt": prompt(1200), "max_tokens": 1}
                await client.post("/v1/completions", json=body)

    prompts = asyncio.create_task(prefill())
    await asyncio.sleep(3.0)
    begun = time.perf_counter()
    outcome = await act()
    ended = time.perf_counter()
    begun = outcome.pop("begun", begun)
    times, _ = await stream
    await prompts
    before = _gaps(times, begun - 2.8, begun - 0.1)
    return {"before": before, "beside": _gaps(times, begun, ended), **outcome}


def _compare(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Gaps in steps: a step is what the stream's usual gap was while prompts came."""
    return {
        "step_ms": round(1000 * median([median(one["before"]) for one in found]), 1),
        "longest_before_steps": [
            round(max(one["before"]) / median(one["before"]), 2) for one in found
        ],
        "longest_beside_steps": [
            round(max(one["beside"]) / median(one["before"]), 2) for one in found
        ],
    }


async def _load_beside(server: Served, new: int) -> tuple[list[float], list[float], float]:
    """Gaps of a stream of the busy model before and during a load of the other; its seconds."""
    times: list[float] = []
    stream = asyncio.create_task(_stream(server.url, "busy", new, times))
    await asyncio.sleep(4.0)
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as own:
        begun = time.perf_counter()
        (await own.post("/admin/api/models/coming/load")).raise_for_status()
        ended = time.perf_counter()
    await asyncio.sleep(1.0)
    assert not stream.done(), "the stream was too short for this load"
    stream.cancel()
    await asyncio.wait([stream])
    return _gaps(times, begun - 3.0, begun - 0.05), _gaps(times, begun, ended), ended - begun


async def _both_busy(url: str) -> dict[str, float]:
    """Rates alone and beside each other: streams (tokens/s), prompts (tokens/s)."""

    async def decode(model: str) -> float:
        times, _ = await _stream(url, model, 60)
        return (len(times) - 2) / (times[-2] - times[0])  # the last event only says that it is over

    async def compute(model: str) -> float:
        begun = time.perf_counter()
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            for _ in range(4):
                body = {"model": model, "prompt": prompt(1200), "max_tokens": 1}
                (await client.post("/v1/completions", json=body)).raise_for_status()
        return 4 * 1200 / (time.perf_counter() - begun)

    alone, prompts_alone = await decode("first"), await compute("second")
    one, other = await asyncio.gather(decode("first"), decode("second"))
    times: list[float] = []
    stream = asyncio.create_task(_stream(url, "first", 4000, times))
    await asyncio.sleep(2.0)
    begun = time.perf_counter()
    prompts = await compute("second")
    gaps = _gaps(times, begun, time.perf_counter())
    stream.cancel()
    await asyncio.wait([stream])
    return {
        "decode_alone": alone,
        "decode_both": one + other,
        "prompts_alone": prompts_alone,
        "prompts_beside_a_stream": prompts,
        "gap_beside_prompts_ms": 1000 * median(gaps),
        "longest_gap_beside_prompts_ms": 1000 * max(gaps),
    }


def busy(rounds: int) -> None:
    """Two models that both have work."""
    with (
        home("first", "second", starter=True) as folder,
        served(folder, folder / "log", "--memory=6GiB") as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        for name in ("first", "second"):
            ask(client, name, prompt(20))
        found = [asyncio.run(_both_busy(server.url)) for _ in range(rounds)]
    figures = {name: [round(one[name], 1) for one in found] for name in found[0]}
    shares = {
        "both_over_alone": median([one["decode_both"] / one["decode_alone"] for one in found]),
        "prompts_over_alone": median(
            [one["prompts_beside_a_stream"] / one["prompts_alone"] for one in found]
        ),
    }
    record("residency busy", figures | {name: round(value, 2) for name, value in shares.items()})


def load(rounds: int) -> None:
    """One comes while another is busy."""
    # So that a profile is measured within a minute beside the stream.
    short = {"PENSTOCK_MODELS_STEP_TOKENS": "256", "PENSTOCK_MODELS_MAX_CONTEXT": "2048"}
    found: dict[bool, list[tuple[list[float], list[float], float]]] = {False: [], True: []}
    with (
        home("busy", "coming", starter=True) as folder,
        served(folder, folder / "log", "--memory=6GiB", environment=short) as server,
        httpx.Client(base_url=server.url, timeout=600) as client,
    ):
        ask(client, "busy", prompt(20))
        for stored in [False] + [True] * rounds:
            if not stored:
                for file in (folder / "profiles").iterdir():
                    file.unlink()
            found[stored].append(asyncio.run(_load_beside(server, 4000)))
            client.post("/admin/api/models/coming/unload").raise_for_status()
    for stored, runs in found.items():
        record(
            f"residency load {'with' if stored else 'without'} a stored profile",
            {
                "load_s": [round(took, 2) for _, _, took in runs],
                "gap_ms": [round(1000 * median(before), 1) for before, _, _ in runs],
                "longest_gap_ms": [round(1000 * max(before), 1) for before, _, _ in runs],
                "gap_beside_ms": [round(1000 * median(beside), 1) for _, beside, _ in runs],
                "longest_gap_beside_ms": [round(1000 * max(beside), 1) for _, beside, _ in runs],
            },
        )


def unload(rounds: int) -> None:
    """One goes while another is busy."""
    found: list[dict[str, Any]] = []
    with (
        home("busy", "going", starter=True) as folder,
        served(folder, folder / "log", "--memory=6GiB") as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        ask(client, "busy", prompt(20))

        async def act() -> dict[str, Any]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as own:
                (await own.post("/admin/api/models/going/unload")).raise_for_status()
                rows = (await own.get("/admin/api/events")).json()
            return {"event": [row for row in rows if row["event"] == "unload"][-1]}

        for _ in range(rounds):
            ask(client, "going", prompt(20))
            found.append(asyncio.run(_beside(server, ("busy", "going"), act)))
    record(
        "residency unload",
        {
            "settled_s": [one["event"]["settled_s"] for one in found],
            "freed_mib": [round(one["event"]["freed_bytes"] / MIB) for one in found],
            **_compare(found),
        },
    )


def death(rounds: int) -> None:
    """One is killed while another streams."""
    with (
        home("busy", "dying", starter=True) as folder,
        served(folder, folder / "log", "--memory=6GiB") as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        for name in ("busy", "dying"):
            ask(client, name, prompt(20))

        async def act() -> dict[str, Any]:
            victim = asyncio.create_task(_stream(server.url, "dying", 4000))
            pid = server.row("dying")["pid"]
            await asyncio.sleep(3.0)  # both are busy: what one costs the other is not on trial
            begun = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            _, last = await victim
            died = time.perf_counter()
            await asyncio.to_thread(ask, client, "dying", prompt(20))
            again = time.perf_counter() - died
            rows = server.get("/admin/api/events")
            loaded = [row for row in rows if row["event"] == "loaded"][-1]
            found = {"last": last, "again_s": again, "load_s": loaded["load_s"], "begun": begun}
            return found | {"phases": loaded["phases"]}

        # Three deaths in five minutes would open the circuit.
        found = [
            asyncio.run(_beside(server, ("busy", "dying"), act)) for _ in range(min(rounds, 2))
        ]
        alone = asyncio.run(_stream(server.url, "busy", 60))[0]
    errors = [json.loads(one["last"][-1])["error"]["code"] for one in found]
    record(
        "residency death",
        {
            "errors": errors,
            "again_s": [round(one["again_s"], 2) for one in found],
            "load_s": [one["load_s"] for one in found],
            "phases": [one["phases"] for one in found],
            "alone_step_ms": round(1000 * median(_gaps(alone, 0, time.perf_counter())), 1),
            **_compare(found),
        },
    )


def main() -> None:
    """Those that are asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="*", help="elastic, busy, load, unload, death")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="for elastic")
    options = parser.parse_args()
    parts: dict[str, Callable[[int], None]] = {
        "elastic": partial(elastic, device=options.device),
        "busy": busy,
        "load": load,
        "unload": unload,
        "death": death,
    }
    for name, run in parts.items():
        if not options.which or name in options.which:
            run(options.rounds)


if __name__ == "__main__":
    main()
