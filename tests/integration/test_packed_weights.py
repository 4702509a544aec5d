"""Packed weights: tokens are those of transformers with the numbers that the codes stand for."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.catalog import read_card
from penstock.errors import ModelUnusable
from penstock.testing import quantised, tiny
from penstock.testing.exactness import (
    MODES,
    Mismatch,
    Mode,
    Reference,
    Tally,
    compare_mode,
    run,
    start_engine,
)
from penstock.worker.backends.cpu import CpuBackend
from penstock.worker.models import weights
from penstock.worker.models.linear.block_fp8 import BlockFp8Weight
from penstock.worker.models.linear.grouped import Int8Weight

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.mark import ParameterSet
    from torch import Tensor

    from penstock.worker.core.engine import GenerateEngine

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [tiny.prompt(length, seed) for seed, length in enumerate((1, 17, 40, 90))]
NEW_TOKENS = 24
CROWDED = Mode("crowded", step_tokens=64, step_sequences=6, pool_tokens=128, give_way_every=7)
# Blocks that are cut at both edges, and (qwen3) such as q, k and v can be joined with.
SHAPES = {
    "llama": {"hidden_size": 192, "intermediate_size": 320},
    "qwen2": {"hidden_size": 192, "intermediate_size": 320},
    "qwen3": {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384},
    "gemma2": {"hidden_size": 192, "intermediate_size": 320},
    # Experts of their own, and (deepseek_v3) tables that are stored with the weights.
    "qwen3_moe": {"hidden_size": 192, "moe_intermediate_size": 72},
    "deepseek_v3": {"hidden_size": 192, "moe_intermediate_size": 72},
    # Experts that are whole groups of any format.
    "glm4_moe": {"hidden_size": 192, "intermediate_size": 320, "moe_intermediate_size": 64},
    "gpt_oss": {"hidden_size": 96, "intermediate_size": 64},
}
BLOCKS = [name for name in SHAPES if name not in ("glm4_moe", "gpt_oss")]
OTHERS = [form for form in quantised.FORMS if form != "fp8-block"]


@pytest.fixture(autouse=True)
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "extent_bytes", 1 << 14)


class PackedModels:
    """Folders in each format, with their references, made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[tuple[str, str], tuple[Path, Reference]] = {}

    def get(self, architecture: str, form: str) -> tuple[Path, Reference]:
        if (architecture, form) not in self._made:
            plain = self._root / architecture
            if not plain.exists():
                tiny.save(architecture, plain, **SHAPES[architecture])
            folder, numbers = plain, self._root / f"{architecture}-{form}"
            if form == "int8":
                numbers = quantised.save_int8_reference(plain, numbers)
            elif architecture == "gpt_oss":
                folder, numbers = quantised.save_stacked_mxfp4(plain, numbers)
            else:
                # Mixed files are the normal case: a layer, or a kind of weight, is left plain.
                keep = {"llama": ".layers.1.", "qwen2": "down_proj"}.get(architecture, "nothing")
                folder, numbers = quantised.save(plain, numbers, form, keep=keep)
            self._made[architecture, form] = folder, Reference.load(numbers)
        return self._made[architecture, form]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> PackedModels:
    return PackedModels(tmp_path_factory.mktemp("packed"))


ALL_MODES = [*MODES, CROWDED]


def pair(architecture: str, mode: Mode) -> ParameterSet:
    """All modes of a dense model and of experts; of the others the hardest, the rest as a proof."""
    short = architecture in ("llama", "qwen3_moe") or mode is CROWDED
    return pytest.param(
        architecture, mode, id=f"{architecture}-{mode}", marks=() if short else pytest.mark.proof
    )


def served(mode: Mode, form: str) -> Mode:
    return replace(mode, dtype="int8") if form == "int8" else mode


@pytest.mark.parametrize("form", ["fp8-block", "int8"])
@pytest.mark.parametrize(("architecture", "mode"), [pair(a, m) for a in BLOCKS for m in ALL_MODES])
def test_tokens_equal_transformers(
    models: PackedModels, architecture: str, mode: Mode, form: str
) -> None:
    check_tokens(models, architecture, mode, form)


@pytest.mark.parametrize("mode", ALL_MODES, ids=str)
@pytest.mark.parametrize(("architecture", "form"), [("llama", "gptq-order"), ("gpt_oss", "mxfp4")])
def test_other_formats_in_all_modes(
    models: PackedModels, architecture: str, form: str, mode: Mode
) -> None:
    check_tokens(models, architecture, mode, form)


@pytest.mark.parametrize("form", OTHERS)
def test_every_other_format(models: PackedModels, form: str) -> None:
    folder, reference = models.get("llama", form)
    engine = start_engine(folder, MODES[2])
    for prompt, tokens in zip(PROMPTS, run(engine, PROMPTS, NEW_TOKENS), strict=True):
        Tally().compare(reference, prompt, tokens)
    check_bytes(engine, folder, reference)


@pytest.mark.parametrize("form", ["fp8-tensor", "ct-pack4", "awq", "nvfp4", "nf4-double"])
def test_experts_in_other_formats(models: PackedModels, form: str) -> None:
    check_tokens(models, "glm4_moe", MODES[2], form)


def check_tokens(models: PackedModels, architecture: str, mode: Mode, form: str) -> None:
    folder, reference = models.get(architecture, form)
    tally = compare_mode(reference, folder, served(mode, form), PROMPTS, NEW_TOKENS)
    assert tally.tokens == len(PROMPTS) * NEW_TOKENS
    assert tally.ties == 0
    assert (tally.preemptions > 0) == (mode is CROWDED)


@pytest.mark.parametrize("form", ["fp8-block", "int8", "gptq-order", "nf4-double"])
def test_small_tiles_give_the_same_tokens(
    models: PackedModels, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Of a few outputs each, which end within blocks."""
    monkeypatch.setattr(weights, "scratch_bytes", lambda *_: 50 * 320 * 4)
    folder, reference = models.get("llama", form)
    compare_mode(reference, folder, served(Mode("at once"), form), PROMPTS, NEW_TOKENS)


@pytest.mark.parametrize("form", ["fp8-block", "int8"])
def test_a_forgotten_scale_is_seen(
    models: PackedModels, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    kind = Int8Weight if form == "int8" else BlockFp8Weight
    plain = kind.dequantise

    def forgetful(weight: Int8Weight, begin: int, end: int, out: Tensor) -> None:
        scales, weight.scales = weight.scales, weight.scales.roll(1, dims=0)
        plain(weight, begin, end, out)  # type: ignore[arg-type]
        weight.scales = scales

    folder, reference = models.get("llama", form)
    engine = start_engine(folder, served(Mode("at once"), form))
    monkeypatch.setattr(kind, "dequantise", forgetful)
    answers = run(engine, PROMPTS, NEW_TOKENS)
    with pytest.raises(Mismatch):
        for prompt, tokens in zip(PROMPTS, answers, strict=True):
            Tally().compare(reference, prompt, tokens)


@pytest.mark.parametrize(
    ("architecture", "form"),
    [
        *((architecture, form) for architecture in BLOCKS for form in ("fp8-block", "int8")),
        ("glm4_moe", "awq"),
        ("gpt_oss", "mxfp4"),
    ],
)
def test_the_catalog_knows_the_bytes_in_memory(
    models: PackedModels, architecture: str, form: str
) -> None:
    folder, reference = models.get(architecture, form)
    engine = start_engine(folder, served(Mode("alone"), form))
    check_bytes(engine, folder, reference, form if form == "int8" else "")
    if form == "fp8-block":  # codes stay where the file is mapped
        ready, codes = engine.ready(), read_card(folder).weight_bytes
        assert ready.copied_bytes < ready.weight_bytes - codes + 100_000


def check_bytes(engine: GenerateEngine, folder: Path, reference: Reference, made: str = "") -> None:
    # transformers' own tables (angles of rotations) are not in files, and small.
    kept = reference.model.state_dict()
    tables = sum(t.nbytes for name, t in reference.model.named_buffers() if name not in kept)
    loaded = engine.ready().weight_bytes
    assert loaded - tables == read_card(folder).bytes_in_memory("float32", made)


def edit(folder: Path, name: str, value: Tensor | None) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    if value is not None:
        tensors[name] = value
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def fp8_folder(tmp_path: Path) -> Path:
    plain = tiny.save("llama", tmp_path / "plain", **SHAPES["llama"])
    return quantised.save(plain, tmp_path / "fp8", "fp8-block")[0]


UP = "model.layers.1.mlp.up_proj.weight"
NOT_NUMBERS = torch.full((320, 192), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (f"{UP}_scale_inv", None, rf"{UP} \(F8_E4M3 \[320, 192\]\) is quantised in a format"),
        (f"{UP}_scale_inv", torch.ones(3, 1), rf"{UP}_scale_inv has shape \[3, 1\]"),
        (UP, torch.zeros(320, 100).to(torch.float8_e4m3fn), r"_scale_inv has shape \[3, 2\]"),
        (UP, NOT_NUMBERS, rf"cannot be used: {UP} has codes that are not numbers"),
        (
            UP,
            torch.zeros(300, 192).to(torch.float8_e4m3fn),
            rf"{UP} is \[300, 192\] instead of \[320, 192\]",
        ),
        ("model.norm.weight", None, r"cannot be used: model\.norm\.weight is missing"),
        (
            "model.norm.weight",
            torch.zeros(7),
            r"cannot be used: model\.norm\.weight \[7\] is not in it",
        ),
    ],
)
def test_broken_files_are_refused_with_the_tensor(
    fp8_folder: Path, name: str, value: Tensor | None, sentence: str
) -> None:
    edit(fp8_folder, name, value)
    with pytest.raises(ModelUnusable, match=sentence):
        start_engine(fp8_folder, Mode("alone"))


def test_a_packed_head_that_is_the_embedding_is_refused(fp8_folder: Path) -> None:
    head = load_file(fp8_folder / "model.safetensors")["lm_head.weight"]
    edit(fp8_folder, "lm_head.weight", head.to(torch.float8_e4m3fn))
    tensors = load_file(fp8_folder / "model.safetensors")
    tensors["lm_head.weight_scale_inv"] = torch.ones(2, 2)
    save_file(tensors, fp8_folder / "model.safetensors", metadata={"format": "pt"})
    start_engine(fp8_folder, Mode("alone"))
    file = fp8_folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    with pytest.raises(ModelUnusable, match=r"lm_head\.weight is the embedding's as well"):
        start_engine(fp8_folder, Mode("alone"))


def test_layers_that_are_not_linear_are_not_rounded(tmp_path: Path) -> None:
    folder = tiny.save("gpt2", tmp_path)
    with pytest.raises(
        ModelUnusable, match=r"c_attn\.weight is of no linear layer\. Choose another"
    ):
        start_engine(folder, Mode("alone", dtype="int8"))


def test_experts_must_all_be_there(tmp_path: Path) -> None:
    plain = tiny.save("qwen3_moe", tmp_path / "plain", **SHAPES["qwen3_moe"])
    folder, _ = quantised.save(
        plain, tmp_path / "fp8", "fp8-block", keep=".1.mlp.experts.5.up_proj"
    )
    with pytest.raises(ModelUnusable, match=r"experts\.5\.up_proj\.weight \[72, 192\] is not in"):
        start_engine(folder, Mode("alone"))


def test_plain_experts_beside_packed_weights(tmp_path: Path) -> None:
    """One by one in the file, stacked in the model."""
    plain = tiny.save("glm4_moe", tmp_path / "plain", **SHAPES["glm4_moe"])
    folder, numbers = quantised.save(plain, tmp_path / "w4", "ct-pack4", keep=".mlp.experts.")
    compare_mode(Reference.load(numbers), folder, MODES[2], PROMPTS, NEW_TOKENS)
    lost = "model.layers.2.mlp.experts.7.down_proj.weight"
    edit(folder, lost, None)
    with pytest.raises(ModelUnusable, match=rf"cannot be used: {lost} is missing"):
        start_engine(folder, Mode("alone"))
    edit(folder, "model.layers.1.mlp.experts.3.up_proj.weight", torch.ones(3, 192))
    with pytest.raises(
        ModelUnusable, match=r"3\.up_proj\.weight is \[3, 192\] instead of \[64, 192\]"
    ):
        start_engine(folder, Mode("alone"))


def test_layers_that_the_model_has_no_use_for_are_not_read(tmp_path: Path) -> None:
    """As those of DeepSeek that propose tokens."""
    shape = SHAPES["deepseek_v3"]
    plain = tiny.save("deepseek_v3", tmp_path / "plain", **shape)
    folder, _ = quantised.save(plain, tmp_path / "fp8", "fp8-block")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    of_one = "model.layers.0.mlp.up_proj.weight"
    for name in (of_one, f"{of_one}_scale_inv"):
        tensors[name.replace(".0.", ".61.")] = tensors[name].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    start_engine(folder, Mode("alone"))


def test_scales_of_activations_are_left_out_and_told_once(
    models: PackedModels, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = models.get("llama", "fp8-channel")
    with caplog.at_level("INFO", "penstock.worker.models.weights"):
        start_engine(folder, Mode("alone"))
    told = [record.getMessage() for record in caplog.records if "not used" in record.getMessage()]
    assert len(told) == 1
    assert "14 scales for activations or KV are not used" in told[0]


def test_a_bias_of_zeros_that_the_model_has_no_use_for(
    models: PackedModels, tmp_path: Path
) -> None:
    """GPTQ files have them."""
    shutil.copytree(models.get("llama", "gptq")[0], folder := tmp_path / "biased")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.bias"
    for bias, taken in ((torch.zeros(192), True), (torch.ones(192), False)):
        tensors[name] = bias.half()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if taken:
            start_engine(folder, Mode("alone"))
        else:
            with pytest.raises(ModelUnusable, match=rf"{name} \[192\] is not in it"):
                start_engine(folder, Mode("alone"))
