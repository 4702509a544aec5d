"""Quantised folders of tiny models: which tensors are rounded, and what is refused, and when."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.catalog import read_card
from penstock.errors import ModelUnusable, PullFailed
from penstock.testing import tiny
from penstock.worker.models.build import config_of
from penstock.worker.quantize.making import quantize

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
QWEN = {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2}


def make(source: Path, target: Path, wanted: str = "int4") -> dict[str, torch.Tensor]:
    """The tensors of a quantised folder."""
    target.mkdir()
    told: list[tuple[int, int]] = []
    config = config_of(str(source), source.name)
    quantize(source, target, config, wanted, lambda done, total: told.append((done, total)))
    read: dict[str, torch.Tensor] = {}
    for file in target.glob("*.safetensors"):
        read |= load_file(file)
    size = sum(tensor.nbytes for tensor in read.values())
    assert (told[0], told[-1]) == ((0, size), (size, size))
    assert told == sorted(told)
    return read


def said(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    found: dict[str, Any] = config["quantization_config"]
    return found


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("wanted", "group", "form"),
    [("int8", None, "ct-pack"), ("int4", 64, "ct-pack"), ("fp8", None, "fp8-channel")],
)
def test_layers_are_rounded_and_nothing_else(
    tmp_path: Path, wanted: str, group: int | None, form: str
) -> None:
    source = tiny.save("llama", tmp_path / "plain", **LLAMA, tie_word_embeddings=True)
    before = load_file(source / "model.safetensors")
    made = make(source, tmp_path / "made", wanted)
    kept = {name: tensor for name, tensor in made.items() if tensor.dtype == torch.float32}
    assert kept.keys() == {name for name in before if "_proj" not in name}
    assert all(torch.equal(tensor, before[name]) for name, tensor in kept.items())
    scales = [name for name in made if name.endswith("_proj.weight_scale")]
    assert len(scales) == 2 * 7
    assert {made[name].dtype for name in scales} == {torch.bfloat16}
    described = said(tmp_path / "made")
    assert described["ignore"] == ["lm_head"]
    assert described["config_groups"]["group_0"]["weights"]["group_size"] == group
    card = read_card(tmp_path / "made")
    assert (card.formats, card.parameters) == ((form,), read_card(source).parameters)


def test_stacked_experts_are_written_one_by_one(tmp_path: Path) -> None:
    alone = tiny.save("qwen3_moe", tmp_path / "alone", **QWEN)
    tensors = load_file(alone / "model.safetensors")
    stacked = tmp_path / "stacked"
    shutil.copytree(alone, stacked)
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{experts}.{e}.{part}_proj.weight") for e in range(8)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{experts}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{experts}.down_proj"] = down
    rewrite(stacked, tensors)
    made, again = make(alone, tmp_path / "a"), make(stacked, tmp_path / "b")
    assert "model.layers.1.mlp.experts.7.gate_proj.weight_packed" in made
    assert made.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in made.items())
    ignored = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert said(tmp_path / "a")["ignore"] == said(tmp_path / "b")["ignore"] == ignored


def test_experts_that_do_not_fit_the_groups_all_stay(tmp_path: Path) -> None:
    """Of 72 inputs in one of three projections."""
    source = tiny.save("qwen3_moe", tmp_path / "plain", **QWEN | {"moe_intermediate_size": 72})
    made = make(source, tmp_path / "made")
    assert not [name for name in made if ".experts." in name and "packed" in name]
    assert "model.layers.0.self_attn.q_proj.weight_packed" in made
    assert "model.layers.0.mlp.experts.0.gate_proj" in said(tmp_path / "made")["ignore"]


def test_files_and_their_index_are_those_of_the_source(tmp_path: Path) -> None:
    source = tmp_path / "plain"
    model = tiny.build(tiny.config("llama", **LLAMA))
    model.half().save_pretrained(source, max_shard_size="300KB")
    made = make(source, tmp_path / "made")
    names = sorted(path.name for path in source.glob("*.safetensors"))
    assert len(names) > 2
    assert sorted(path.name for path in (tmp_path / "made").glob("*.safetensors")) == names
    index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == made.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in made.values())
    assert read_card(tmp_path / "made").formats == ("ct-pack",)
    # The scales are of the type that other servers compute in.
    assert made["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.float16


def test_rows_are_rounded_alike_however_many_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.save("llama", tmp_path / "plain", **LLAMA)
    made = make(source, tmp_path / "made")
    monkeypatch.setattr("penstock.worker.quantize.making._MOST_AT_ONCE", 3 * 128)
    monkeypatch.setattr("penstock.worker.quantize.making._COPIED_BYTES", 100)
    again = make(source, tmp_path / "again")
    assert all(torch.equal(tensor, again[name]) for name, tensor in made.items())


@pytest.mark.parametrize(
    ("architecture", "changes", "sentence"),
    [
        ("gpt2", {}, r"h\.0\.attn\.c_attn\.weight is of no linear layer"),
        ("gpt_oss", {"hidden_size": 64}, r"experts\.0\.\w+_proj\.weight is of no linear layer"),
        ("llama", {"hidden_size": 72, "intermediate_size": 72, "head_dim": 18}, "inputs are 72"),
    ],
)
def test_models_that_could_not_be_served_are_refused_before_anything_is_written(
    tmp_path: Path, architecture: str, changes: dict[str, int], sentence: str
) -> None:
    source = tiny.save(architecture, tmp_path / "plain", **changes)
    with pytest.raises(ModelUnusable, match=sentence):
        make(source, tmp_path / "made")
    assert list((tmp_path / "made").iterdir()) == []


def test_names_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    source = tiny.save("llama", tmp_path / "plain", **LLAMA)
    tensors = load_file(source / "model.safetensors")
    tensors["transformer.wte.weight"] = tensors.pop("model.embed_tokens.weight")
    rewrite(source, tensors)
    with pytest.raises(ModelUnusable, match=r"wte\.weight is not a weight of LlamaForCausalLM"):
        make(source, tmp_path / "made")


def test_numbers_that_are_not_finite_are_a_sentence(tmp_path: Path) -> None:
    source = tiny.save("llama", tmp_path / "plain", **LLAMA)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5, 5] = torch.nan
    rewrite(source, tensors)
    with pytest.raises(ModelUnusable, match=r"1\.mlp\.up_proj\.weight has numbers that are not"):
        make(source, tmp_path / "made", "fp8")


def test_a_disk_without_room_is_seen_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.save("llama", tmp_path / "plain", **LLAMA)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(PullFailed, match=r"to int4 needs \d+ bytes .* has 1000 bytes free"):
        make(source, tmp_path / "made")
    assert list((tmp_path / "made").iterdir()) == []
