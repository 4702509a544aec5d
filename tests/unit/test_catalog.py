"""Cards are exact, and whatever cannot be read is refused with the file and the field."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from penstock import shapes
from penstock.catalog import Catalog, huggingface_cache, read_card, scan
from penstock.catalog.geometry import read_geometry
from penstock.catalog.linear_formats import scratch_bytes
from penstock.catalog.weights import Part
from penstock.errors import ModelUnusable, UnknownModel
from penstock.memory.device_kinds import CPU
from penstock.testing.model_folders import LLAMA, TENSORS, write_model, write_safetensors

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.catalog import Card
    from penstock.catalog.geometry import Geometry


def values_of(model: Card | Geometry) -> int:
    """Numbers of a token's keys and values."""
    return sum(layers.values for layers in model.kv_layers)


def test_a_card_adds_up(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    generation = {"eos_token_id": [5, 7], "temperature": 0.6, "top_k": 20, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    card = read_card(folder)
    assert (card.name, card.kind, card.architecture) == ("tiny", "generate", "LlamaForCausalLM")
    assert (card.parameters, card.weight_bytes, card.dtype) == (136, 544, "float32")
    assert card.bytes_in_memory() == 544
    assert card.bytes_in_memory("bfloat16") == 272
    assert card.layers == ("full_attention",) * 2
    assert values_of(card) == 2 * 2 * 2 * 2  # layers, K and V, heads, dim
    assert (card.context, card.hidden_size, card.vocab_size) == (128, 8, 16)
    assert card.eos_token_ids == (5, 7)
    assert card.sampling_defaults == {"temperature": 0.6, "top_k": 20.0}
    assert card.source == str(folder)


def test_end_ids_fall_back_to_the_configuration(tmp_path: Path) -> None:
    assert read_card(write_model(tmp_path / "m")).eos_token_ids == (3,)


def test_shards_are_added_over_the_index(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    names = list(TENSORS)
    for number, name in enumerate(names):
        write_safetensors(folder / f"part-{number}.safetensors", {name: TENSORS[name]})
    mapping = {name: f"part-{number}.safetensors" for number, name in enumerate(names)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": mapping}))
    assert read_card(folder).parameters == 136

    (folder / "part-1.safetensors").rename(folder / "part-9.safetensors")
    with pytest.raises(ModelUnusable, match="lacks 1 of its 2 weight files"):
        read_card(folder)
    write_safetensors(folder / "part-1.safetensors", {"other": ("F32", (2,))})
    with pytest.raises(ModelUnusable, match=r"part-1.safetensors lacks model.norm.weight"):
        read_card(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../../outside.safetensors"}}))
    with pytest.raises(ModelUnusable, match="not a file beside it"):
        read_card(folder)


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
FP8_TENSORS = {
    **TENSORS,  # an embedding and a norm: 136 weights
    "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", (200, 300)),
    "model.layers.0.mlp.up_proj.weight_scale_inv": ("BF16", (2, 3)),
    "model.layers.0.mlp.up_proj.input_scale": ("F32", (1,)),  # not used
    "model.layers.0.mlp.down_proj.weight": ("BF16", (300, 200)),
}


def test_packed_weights_count_as_what_they_are_in_memory(tmp_path: Path) -> None:
    card = read_card(write_model(tmp_path / "q", {**LLAMA, **FP8}, FP8_TENSORS))
    assert card.formats == ("fp8-block",)
    assert card.parameters == 136 + 2 * 200 * 300
    # Codes, scales in float32, and one tile to de-quantise them in.
    packed = 200 * 300 + 6 * 4 + scratch_bytes(1, CPU)
    assert card.bytes_in_memory("bfloat16") == packed + (136 + 200 * 300) * 2
    assert card.bytes_in_memory("float32") == packed + (136 + 200 * 300) * 4


def test_plain_weights_of_layers_may_become_int8(tmp_path: Path) -> None:
    tensors = {
        **FP8_TENSORS,
        "lm_head.weight": ("BF16", (16, 8)),
        "model.layers.0.mlp.gate.weight": ("BF16", (4, 8)),  # a router
        "model.layers.0.mlp.experts.3.up_proj.weight": ("BF16", (10, 8)),
    }
    card = read_card(write_model(tmp_path / "q", {**LLAMA, **FP8}, tensors))
    packed = 200 * 300 + 6 * 4 + scratch_bytes(1, CPU)
    made = 200 * 300 + 300 * 4 + 10 * 8 + 10 * 4
    assert card.bytes_in_memory("bfloat16", "int8") == packed + made + (136 + 128 + 32) * 2
    shape = Catalog([tmp_path]).make("random:tiny-llama")
    with pytest.raises(ModelUnusable, match="random weights is not rounded to int8"):
        shape.bytes_in_memory("bfloat16", "int8")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("up_proj.qweight", ("I32", (2, 4))),
        ("up_proj.weight", ("U8", (2, 4))),
        ("up_proj.weight", ("F8_E4M3", (4, 8))),  # without its scales
        ("up_proj.weight_packed", ("I32", (2, 4))),
        ("up_proj.weight_scale", ("F32", (1,))),
        ("experts.gate_up_proj_blocks", ("U8", (2, 16))),
    ],
)
def test_an_unknown_format_is_refused_with_the_tensor(
    tmp_path: Path, name: str, tensor: tuple[str, tuple[int, ...]]
) -> None:
    folder = write_model(tmp_path / "q", LLAMA, {**TENSORS, f"model.layers.0.{name}": tensor})
    named = re.escape(f"model.layers.0.{name} ({tensor[0]} {list(tensor[1])}) is quantised in a")
    with pytest.raises(ModelUnusable, match=named):
        read_card(folder)


def test_scales_of_other_blocks_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    wrong = {**FP8_TENSORS, name: ("F32", (4, 5))}
    folder = write_model(tmp_path / "q", {**LLAMA, **FP8}, wrong)
    with pytest.raises(ModelUnusable, match=rf"{name} has shape \[4, 5\].* would have \[2, 3\]"):
        read_card(folder)


def test_other_blocks_are_refused(tmp_path: Path) -> None:
    other = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [112, 128]}}
    folder = write_model(tmp_path / "q", {**LLAMA, **other}, FP8_TENSORS)
    with pytest.raises(ModelUnusable, match=r"weight_block_size is \[112, 128\]"):
        read_card(folder)


def test_a_quantised_model_without_packed_weights_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "q", {**LLAMA, "quantization_config": {"quant_method": "new"}})
    with pytest.raises(ModelUnusable, match=r"config.json: quantization_config \(new\) says"):
        read_card(folder)


def _geometry(tmp_path: Path, **changes: Any) -> Any:
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    return read_geometry(config, tmp_path / "config.json")


def test_nested_text_configuration_wins_over_vision_fields(tmp_path: Path) -> None:
    geometry = _geometry(
        tmp_path,
        model_type="qwen2_5_vl",
        hidden_size=999,
        num_hidden_layers=77,
        vision_config={"hidden_size": 1280, "num_hidden_layers": 40, "num_heads": 16},
        text_config={**LLAMA, "num_hidden_layers": 3},
    )
    assert (geometry.model_type, geometry.hidden_size, len(geometry.layers)) == ("llama", 8, 3)


def test_legacy_names_are_known(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "n_embd": 12,
        "n_head": 3,
        "n_layer": 2,
        "n_positions": 64,
        "vocab_size": 9,
    }
    geometry = read_geometry(config, tmp_path / "config.json")
    assert (geometry.hidden_size, geometry.context, len(geometry.layers)) == (12, 64, 2)
    assert values_of(geometry) == 2 * 2 * 3 * 4  # every head has its own K and V


@pytest.mark.parametrize(
    ("changes", "kv_values", "kv_vectors"),
    [
        ({"head_dim": 32}, 2 * 2 * 2 * 32, 2 * 2 * 2),
        ({"num_key_value_heads": None}, 2 * 2 * 4 * 2, 2 * 2 * 4),
        ({"num_key_value_heads": [1, 4]}, 2 * (1 + 4) * 2, 2 * (1 + 4)),
        ({"multi_query": True}, 2 * 2 * 1 * 2, 2 * 2 * 1),
        (
            {
                "kv_lora_rank": 4,
                "qk_nope_head_dim": 6,
                "qk_rope_head_dim": 2,
                "v_head_dim": 5,
            },
            2 * 4 * (8 + 5),
            2 * 4 * 2,
        ),
        (
            {
                "head_dim": 4,
                "global_head_dim": 8,
                "num_global_key_value_heads": 1,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            2 * 2 * 4 + 2 * 1 * 8,
            2 * 2 + 2 * 1,
        ),
        ({"layer_types": ["linear_attention", "full_attention"]}, 2 * 2 * 2, 2 * 2),
    ],
)
def test_kv_per_token(
    tmp_path: Path, changes: dict[str, Any], kv_values: int, kv_vectors: int
) -> None:
    geometry = _geometry(tmp_path, **changes)
    assert values_of(geometry) == kv_values
    assert sum(layers.vectors for layers in geometry.kv_layers) == kv_vectors


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, "ssssss"),
        ({"model_type": "gemma2", "sliding_window": 64}, "sfsfsf"),
        ({"model_type": "gemma3_text", "sliding_window": 64}, "sssssf"),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, "ffffff"),
        ({"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 4}, "ffffss"),
        ({"model_type": "qwen3_next", "full_attention_interval": 3}, "llfllf"),
        ({"model_type": "jamba", "attn_layer_period": 3, "attn_layer_offset": 1}, "mfmmfm"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*M-"}, "mpmfmp"),
        ({"model_type": "mamba2"}, "rrrrrr"),
    ],
)
def test_layer_kinds(tmp_path: Path, changes: dict[str, Any], pattern: str) -> None:
    letters = {
        "s": "sliding_attention",
        "f": "full_attention",
        "l": "linear_attention",
        "m": "mamba",
        "p": "mlp",
        "r": "recurrent",
    }
    geometry = _geometry(tmp_path, num_hidden_layers=6, **changes)
    assert geometry.layers == tuple(letters[letter] for letter in pattern)


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"max_position_embeddings": None, "n_ctx": 77}, 77),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 100,
                }
            },
            400,
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 128),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, 128),
        ({"rope_scaling": {"type": "dynamic", "factor": 8.0}}, 128),
        # Without the original length transformers takes the stated one for it.
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 512),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            32,
        ),
        (
            {
                "original_max_position_embeddings": 64,
                "rope_scaling": {"type": "su", "original_max_position_embeddings": 32},
            },
            64,
        ),
        ({"model_type": "phi3", "max_position_embeddings": 131072, "rope_scaling": None}, 131072),
        (
            {
                "model_type": "phi3",
                "max_position_embeddings": 131072,
                "rope_scaling": {"type": "yarn", "short_factor": [1.0], "long_factor": [4.0]},
            },
            4096,
        ),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {
                        "rope_type": "yarn",
                        "factor": 8.0,
                        "original_max_position_embeddings": 100,
                    },
                }
            },
            800,
        ),
        (
            {
                "max_position_embeddings": None,
                "text_config": {
                    **LLAMA,
                    "max_position_embeddings": 128,
                    "rope_scaling": {
                        "rope_type": "longrope",
                        "original_max_position_embeddings": 32,
                    },
                },
            },
            32,
        ),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 513, "pad_token_id": 0}, 512),
    ],
)
def test_window(tmp_path: Path, changes: dict[str, Any], context: int) -> None:
    assert _geometry(tmp_path, **changes).context == context


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", None),
        ("num_hidden_layers", None),
        ("num_hidden_layers", 0),
        ("vocab_size", "16"),
        ("max_position_embeddings", True),
        ("num_attention_heads", -4),
        ("model_type", None),
        ("architectures", None),
    ],
)
def test_a_missing_or_wrong_field_is_named(tmp_path: Path, field: str, value: Any) -> None:
    # A family without defaults, and no key-value heads to stand in for the attention heads.
    config = {**LLAMA, "model_type": "novel", "num_key_value_heads": None, field: value}
    folder = write_model(tmp_path / "m", {k: v for k, v in config.items() if v is not None})
    with pytest.raises(ModelUnusable) as caught:
        read_card(folder)
    assert str(folder / "config.json") in caught.value.message
    assert field in caught.value.message or field == "num_attention_heads"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x05\x00", "too short"),
        (b"\xff" * 64, "truncated or not a safetensors file"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00{]", "broken safetensors header"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00[]", "broken safetensors header"),
    ],
)
def test_a_broken_weight_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelUnusable, match=message) as caught:
        read_card(folder)
    assert str(folder / "model.safetensors") in caught.value.message


@pytest.mark.parametrize("change_bytes", [-1, 1])
def test_a_weight_file_of_the_wrong_length_is_refused(tmp_path: Path, change_bytes: int) -> None:
    folder = write_model(tmp_path / "m")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] if change_bytes < 0 else whole + b"\0")
    with pytest.raises(ModelUnusable, match=f"is {len(whole) + change_bytes} bytes but its header"):
        read_card(folder)


def test_bad_json_missing_files_and_pickles_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelUnusable, match="has no weights"):
        read_card(folder)
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(ModelUnusable, match=r"only pickled weights \(pytorch_model.bin\)"):
        read_card(folder)
    write_safetensors(folder / "model-00001-of-00002.safetensors", TENSORS)
    with pytest.raises(ModelUnusable, match=r"neither model.safetensors nor"):
        read_card(folder)
    (folder / "config.json").write_text('{"model_type":')
    with pytest.raises(ModelUnusable, match=r"config.json is not valid JSON"):
        read_card(folder)
    with pytest.raises(ModelUnusable, match="not a folder"):
        read_card(tmp_path / "absent")


@pytest.mark.parametrize(
    ("architecture", "changes", "kind"),
    [
        ("Qwen2ForCausalLM", {}, "generate"),
        ("GPT2LMHeadModel", {}, "generate"),
        ("BertModel", {}, "embed"),
        ("XLMRobertaForSequenceClassification", {"id2label": {"0": "LABEL_0"}}, "rerank"),
        ("XLMRobertaForSequenceClassification", {"num_labels": 1}, "rerank"),
        ("XLMRobertaForSequenceClassification", {}, "other"),  # a classifier of two labels
        ("T5ForConditionalGeneration", {"is_encoder_decoder": True}, "other"),
    ],
)
def test_kinds(tmp_path: Path, architecture: str, changes: dict[str, Any], kind: str) -> None:
    config = {**LLAMA, "architectures": [architecture], **changes}
    assert read_card(write_model(tmp_path / "m", config)).kind == kind


def test_scan_finds_folders_of_one_and_two_levels_and_reports_the_broken(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "one")
    write_model(tmp_path / "models" / "org" / "two")
    write_model(tmp_path / "models" / ".pull" / "half")
    write_model(tmp_path / "models" / "bad", {"model_type": "llama"})
    catalog = Catalog([tmp_path / "models", tmp_path / "absent"])
    assert list(catalog.scan()) == ["one", "org/two"]
    assert list(catalog.problems) == ["bad"]
    assert "architectures" in catalog.problems["bad"]
    assert catalog.find("org/two").path == tmp_path / "models" / "org" / "two"
    with pytest.raises(ModelUnusable, match="architectures"):
        catalog.find("bad")
    with pytest.raises(UnknownModel, match=r"'three'. Known models: bad, one, org/two\."):
        catalog.find("three")


def test_a_loose_gguf_file_is_a_problem_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    catalog = Catalog([tmp_path])
    assert catalog.scan() == {}
    assert "penstock pull" in catalog.problems["small.gguf"]
    with pytest.raises(ModelUnusable, match=r"penstock pull .*small\.gguf"):
        catalog.find("small")


def test_models_in_a_huggingface_cache_are_found(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name--x"
    write_model(repository / "snapshots" / "aaa", {**LLAMA, "vocab_size": 11})
    write_model(repository / "snapshots" / "bbb")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("aaa")
    (tmp_path / "hub" / "datasets--org--other").mkdir()
    (tmp_path / "hub" / "models--org--empty" / "snapshots").mkdir(parents=True)
    catalog = Catalog([], tmp_path / "hub")
    assert list(catalog.scan()) == ["org/name--x"]
    assert catalog.find("org/name--x").vocab_size == 11


def test_the_huggingface_cache_follows_its_own_variables(tmp_path: Path) -> None:
    cache = {"HF_HUB_CACHE": str(tmp_path / "a"), "HF_HOME": str(tmp_path / "b")}
    assert huggingface_cache(cache) == tmp_path / "a"
    assert huggingface_cache({"HF_HOME": str(tmp_path / "b")}) == tmp_path / "b" / "hub"
    xdg = {"XDG_CACHE_HOME": str(tmp_path)}
    assert huggingface_cache(xdg) == tmp_path / "huggingface" / "hub"


@pytest.mark.parametrize("shape", sorted(shapes.SHAPES))
def test_shapes_are_made_for_operators_only(tmp_path: Path, shape: str) -> None:
    catalog = Catalog([tmp_path])
    with pytest.raises(UnknownModel, match="an operator loads it"):
        catalog.find(f"random:{shape}")
    assert not list(tmp_path.iterdir())
    card = catalog.make(f"random:{shape}")
    assert catalog.find(f"random:{shape}") == catalog.make(f"random:{shape}") == card
    assert card.source == f"random:{shape}"
    # Packed ones have a tile in memory beside them.
    packed = card.weights.packed.get("", Part()).resident_bytes
    assert card.weight_bytes == card.bytes_in_memory(card.dtype) - scratch_bytes(packed, CPU)
    assert catalog.scan() == {f"random:{shape}": card}
    assert {path.name for path in tmp_path.iterdir()} == {f"random:{shape}"}


def test_the_memory_test_shape_has_much_kv_and_few_weights(tmp_path: Path) -> None:
    card = Catalog([tmp_path]).make("random:big-kv")
    assert values_of(card) * 4 == 256 << 10
    assert card.context == 131072
    assert card.bytes_in_memory("float32") < 64 << 20


def test_an_unknown_shape_lists_the_known_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"'huge'; the shapes are big-kv, lfm2-1.2b, llama-1b"):
        Catalog([tmp_path]).find("random:huge")
    with pytest.raises(UnknownModel, match=r"'huge'; the shapes are big-kv, lfm2-1.2b, llama-1b"):
        Catalog([tmp_path]).make("random:huge")
    assert not list(tmp_path.iterdir())


def test_a_shape_tokenizer_spells_any_text_and_decodes_every_id() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(shapes.tokenizer(1000)))
    text = "Grüße, 世界 🙂\n\t<|end|> 12"
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert shapes.END in encoded.tokens
    assert len({tokenizer.decode([token]) for token in range(260, 1000)}) == 740


def test_a_folder_is_read_again_only_when_its_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counting(path: Path, name: str) -> Card:
        read.append(name)
        return read_card(path, name)

    monkeypatch.setattr(scan, "read_card", counting)
    folder = tmp_path / "a-model"
    write_model(folder)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    catalog = Catalog([tmp_path])
    first = catalog.scan()
    assert catalog.scan() == first
    assert catalog.find("a-model") == first["a-model"]
    assert sorted(read) == ["a-model", "broken"]
    with pytest.raises(ModelUnusable, match=re.escape(catalog.problems["broken"])):
        catalog.find("broken")

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 77}))
    assert catalog.find("a-model").context == 77
    shutil.rmtree(folder)
    assert list(catalog.scan()) == []
    with pytest.raises(UnknownModel):
        catalog.find("a-model")
