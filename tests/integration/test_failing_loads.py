"""Loads that must fail, by real workers: a sentence, every byte back, no grudge once repaired."""

from __future__ import annotations

import json
import shutil
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


def stored_model(folder: Path) -> Path:
    """A tiny model with weights of its own, a tokenizer and all."""
    folder.mkdir(parents=True)
    shapes.write_folder("random:tiny-llama", folder)
    (folder / "penstock.json").unlink()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    whole = stored_model(home / "whole")
    for fault in def shape(folder: Path) -> None:
    edit(folder / "config.json", intermediate_size=180)


def architecture(folder: Path) -> None:
    edit(folder / "config.json", architectures=["NovelForCausalLM"], model_type="novel")


def rubbish(folder: Path) -> None:
    (folder / "config.json").write_text("{no")


def large(folder: Path) -> None:
    shapes.write_folder("random:qwen3-8b", folder)


# What is wrong, the status, and what the sentence must name.
FAULTS: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "truncated": (truncate, 400, "model.safetensors"),
    "shape": (shape, 400, "config.json"),
    "architecture": (architecture, 400, "config.json"),
    "rubbish": (rubbish, 400, "config.json"),
    "large": (large, 507, "memory.limit"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_load_leaves_nothing_behind(home: Path, server: Served, fault: str) -> None:
    folder = home / "models" / fault
    break_it, status, named = FAULTS[fault]
    break_it(folder)
    refused = ask(server, fault)
    assert refused.status_code == status, refused.text
    assert named in refused.json()["error"]["message"]
    assert f"model:{fault}" not in owners(server)
    assert server.row(fault)["pid"] is None if fault != "rubbish" else True
    shutil.rmtree(folder)
    shutil.copytree(home / "whole", folder)
    assert ask(server, fault).status_code == 200
