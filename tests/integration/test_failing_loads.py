"""Loads that must fail, by real workers: a sentence, every byte back, no grudge once repaired."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock import shapes
from penstock.testing.served import Served, served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LIMIT = "1500MiB"
# By which server, template and the other model's worker may differ after a load that failed: what
# one of them came to know meanwhile (a card, a refusal), and the heap's own comings and goings.
TOLERANCE_BYTES = 2 << 20


def stored_model(folder: Path) -> Path:
    """A tiny model with weights of its own, a tokenizer and all."""
    folder.mkdir(parents=True)
    shapes.write_folder("random:tiny-llama", folder)
    (folder / "penstock.json").unlink()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def shape(folder: Path) -> None:
    edit_config(folder, intermediate_size=180)


def architecture(folder: Path) -> None:
    edit_config(folder, architectures=["NovelForCausalLM"], model_type="novel")


def rubbish(folder: Path) -> None:
    (folder / "config.json").write_text("{no")


def large(folder: Path) -> None:
    note = {"source": "random:tiny-llama", "random_seed": 0}
    (folder / "penstock.json").write_text(json.dumps(note))
    edit_config(folder, intermediate_size=1 << 20)  # 3 GiB


SOUND = "sound"
# What is wrong, the status, and what the sentence must name.
FAULTS: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "truncated": (truncated, 400, "model.safetensors"),
    "shape": (shape, 400, "config.json"),
    "architecture": (architecture, 400, "config.json"),
    "rubbish": (rubbish, 400, "config.json"),
    "large": (large, 507, "memory.limit"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    whole = stored_model(home / "whole")
    for fault in (SOUND, *FAULTS):
        shutil.copytree(whole, home / "models" / fault)
    return home


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Served]:
    with served(home, home / "serve.log", f"--memory={LIMIT}", "--device=cpu") as running:
        assert ask(running, SOUND).status_code == 200  # with it the template and its imports
        yield running


def ask(server: Served, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "hi", "max_tokens": 2}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)


def processes_at_rest(server: Served, pids: set[int] | None = None) -> dict[int, int]:
    """The tree's processes and their memory, once nothing moves; or what is left of the time."""
    deadline = time.monotonic() + 20
    before: dict[int, int] = {}
    while (found := server.processes()) != before or (pids is not None and set(found) != pids):
        if time.monotonic() > deadline:
            break
        before = found
        time.sleep(0.3)
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_load_leaves_nothing_behind(home: Path, server: Served, fault: str) -> None:
    folder = home / "models" / fault
    break_it, status, named = FAULTS[fault]
    break_it(folder)
    before = processes_at_rest(server)
    for _ in range(2):  # the second time from memory
        refused = ask(server, fault)
        assert refused.status_code == status, refused.text
        assert named in refused.json()["error"]["message"]
    owners = server.get("/admin/api/memory")["domains"]["ram"]["owners"]
    assert f"model:{fault}" not in owners
    assert not [r for r in server.get("/admin/api/models") if r["name"] == fault and r["pid"]]
    after = processes_at_rest(server, set(before))
    assert set(after) == set(before), "a process is left, or is gone"
    difference = sum(after.values()) - sum(before.values())
    assert abs(difference) <= TOLERANCE_BYTES, (before, after)
    shutil.rmtree(folder)
    shutil.copytree(home / "whole", folder)
    answer = ask(server, fault)
    assert answer.status_code == 200, answer.text
    httpx.post(f"{server.url}/admin/api/models/{fault}/unload", timeout=60).raise_for_status()
