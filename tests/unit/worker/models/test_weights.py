"""Weights straight from their files: what transformers loads, where the names are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
        torch.float32,
        torch.device("cpu"),
        sorted(folder.glob("*.safetensors")),
        {},
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


@torch.inference_mode()
@pytest.mark.parametrize(
    ("tied", "stored_head", "shared"),
    [
        (True, "none", True),
        (True, "the embedding's", True),
        (True, "another", False),
        (False, "another", False),
    ],
)
def test_a_head_is_tied_when_transformers_would_tie_it(
    tied: bool, stored_head: str, shared: bool, tmp_path: Path
) -> None:
    folder = tiny.save("llama", tmp_path / "llama", tie_word_embeddings=tied)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors.pop("lm_head.weight", None)
    embedding = tensors["model.embed_tokens.weight"]
    if stored_head != "none":
        different = stored_head == "another"
        tensors["lm_head.weight"] = embedding.flip(0) if different else embedding.clone()
    save_file(tensors, file, metadata={"format": "pt"})

    ours: Any = stream(folder)
    assert ours is not None
    ours.set_attn_implementation("eager")
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.arange(2, 34)[None]
    torch.testing.assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == shared
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == shared


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
