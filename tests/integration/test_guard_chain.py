"""The guard through the whole real chain: `penstock serve`, a worker, a model, forwards counted.

One server for all of this file. Its models have some 100 KiB of KV a token and a window of
131,072, so that it is the memory that binds, and little of that.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock import shapes
from penstock.config import parse_size
from penstock.testing import tiny
from penstock.testing.served import Served, served
from penstock.worker.core.engine import GenerateEngine
from penstock.worker.core.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WINDOW = 131_072
LIMIT = "704MiB"
_ANSWER_S = 400  # the first one of a model waits until it is measured
NUMBERS = {"reason", "domain", "needed_tokens", "limit_tokens", "needed_bytes", "limit_bytes"}
MODEL: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": WINDOW,
    "vocab_size": 512,
}
TOKEN_BYTES = 3 * 32 * 128 * 2 * 4


def add(home: Path, name: str) -> None:
    folder = home / "models" / name
    folder.mkdir(parents=True)
    shapes.write_folder("random:tiny-llama", folder)  # for its tokenizer
    (folder / "penstock.json").unlink()
    tiny.save("llama", folder, **MODEL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    add(home, "first")
    # The same files: the profile of the first is found for it.
    shutil.copytree(home / "models" / "first", home / "models" / "late")
    nested = shutil.copytree(home / "models" / "first", home / "models" / "nested")
    inner = json.loads((nested / "config.json").read_text())
    outer = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    (nested / "config.json").write_text(json.dumps({**outer, "text_config": inner}))
    # Small steps are quickly measured. Two threads would wait for each other at every operation
    # while other tests use the cores.
    settings = {
        "PENSTOCK_MODELS_STEP_TOKENS": "64",
        "PENSTOCK_MODELS_STEP_SEQUENCES": "8",
        "PENSTOCK_MODELS_THREADS": "1",
    }
    flag = f"--memory={LIMIT}"
    with served(home, home / "serve.log", flag, environment=settings) as running:
        yield running


def complete(server: Served, model: str, tokens: int) -> httpx.Response:
    body = {"model": model, "prompt": [5] * tokens, "max_tokens": 2, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=_ANSWER_S)


def forwards(server: Served) -> float:
    """Steps of all workers since they were loaded."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    return sum(map(float, re.findall(r"^penstock_steps_total{.*} (\S+)$", text, re.MULTILINE)))


def refused(server: Served, model: str, tokens: int) -> dict[str, Any]:
    """The numbers of a refusal for memory, before any forward."""
    before = forwards(server)
    answer = complete(server, model, tokens)
    assert forwards(server) == before
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    numbers: dict[str, Any] = error["penstock"]
    assert set(numbers) == NUMBERS
    assert numbers["reason"] == "memory"
    assert numbers["needed_tokens"] == tokens + 1 > numbers["limit_tokens"]
    assert numbers["needed_bytes"] >= (tokens + 1) * TOKEN_BYTES > numbers["limit_bytes"]
    return numbers


def test_the_first_request_of_all_is_judged_before_anything_is_loaded(server: Served) -> None:
    numbers = refused(server, "first", WINDOW - 100)
    assert numbers["limit_bytes"] <= parse_size(LIMIT)  # the user's own, not the machine's
    assert server.get("/admin/api/models") == []


def test_a_config_inside_another_is_judged_by_what_is_inside(server: Served) -> None:
    refused(server, "nested", WINDOW - 100)
    over_the_window = complete(server, "nested", WINDOW).json()["error"]["penstock"]
    assert over_the_window["reason"] == "window"
    assert over_the_window["limit_tokens"] == WINDOW


def test_a_model_that_leaves_little_room_loads_and_a_smaller_prompt_runs(server: Served) -> None:
    assert complete(server, "first", 20).status_code == 200
    assert server.row("first")["kv_tokens"] < WINDOW // 16
    limit = refused(server, "first", 20_000)["limit_tokens"]
    before = forwards(server)
    # A little less than the limit: the server's own size is in it, and moves.
    assert complete(server, "first", limit * 9 // 10).status_code == 200
    assert forwards(server) > before


def test_a_model_that_is_loaded_late_is_guarded_alike(server: Served) -> None:
    assert complete(server, "first", 20).status_code == 200
    assert complete(server, "late", 20).status_code == 200
    limit = refused(server, "late", 20_000)["limit_tokens"]
    assert complete(server, "late", limit // 2).status_code == 200


def test_a_plan_and_a_request_agree(server: Served) -> None:
    assert complete(server, "first", 20).status_code == 200
    for tokens in (20, 20_000):
        body = {"model": "first", "prompt": [5] * tokens, "max_tokens": 2}
        plan = httpx.post(f"{server.url}/v1/plan", json=body, timeout=60).json()
        status = complete(server, "first", tokens).status_code
        assert (plan["verdict"] == "refuse") == (status == 400)


def test_no_engine_without_a_profile() -> None:
    """The type asks for it, and the only place that makes one is the measurement at load."""
    taken = inspect.signature(GenerateEngine.__init__).parameters
    assert taken["profile"].annotation in (Profile, "Profile")
    assert taken["profile"].default is inspect.Parameter.empty
    with pytest.raises(TypeError, match="profile"):
        GenerateEngine(None, None, None)  # type: ignore[call-arg, arg-type]
