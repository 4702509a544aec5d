"""Weights straight from their files: what transformers loads, where the names are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.testing import tiny
from penstock.worker.models import attention, weights

if TYPE_CHECKING:
    from pathlib import Path

attention.register()


def stream(folder: Path, told: list[int] | None = None) -> torch.nn.Module | None:
    return weights.stream(
        AutoConfig.from_pretrained(folder),
        attention.IMPLEMENTATION,
        torch.float32,
        torch.device("cpu"),
        sorted(folder.glob("*.safetensors")),
        lambda done, _: None if told is None else told.append(done),
    )


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
def test_it_is_the_model_that_transformers_loads(name: str, tmp_path: Path) -> None:
    folder = tiny.save(name, tmp_path / name)
    told: list[int] = []
    ours = stream(folder, told)
    assert ours is not None
    assert told == sorted(told) and told
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    found = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("spoil", ["missing", "renamed", "another shape", "cut off"])
def test_anything_else_is_left_to_transformers(spoil: str, tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path / "llama")
    (file,) = folder.glob("*.safetensors")
    if spoil == "cut off":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        tensors = load_file(file)
        name = "model.norm.weight"
        norm = tensors.pop(name)
        if spoil == "renamed":
            tensors["norm.weight"] = norm
        elif spoil == "another shape":
            tensors[name] = norm[:-1].clone()
        save_file(tensors, file, metadata={"format": "pt"})
    assert stream(folder) is None
