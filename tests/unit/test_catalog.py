"""Cards are exact, and whatever cannot be read is refused with the file and the field."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from penstock import shapes
from penstock.catalog import Catalog, huggingface_cache, read_card
from penstock.catalog.geometry import read_geometry
from penstock.errors import ModelUnusable, UnknownModel
from penstock.testing.model_folders import LLAMA, TENSORS, write_model, write_safetensors

if TYPE_CHECKING:
    from pathlib import Path


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
    assert card.kv_bytes_per_token(4) == 2 * 2 * 2 * 2 * 4  # layers, K and V, heads, dim, bytes
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


@pytest.mark.parametrize(
    ("tensors", "quantization", "parameters", "as_bfloat16"),
    [
        ({"w.weight": ("F8_E4M3", (4, 8))}, {"quant_method": "fp8"}, 32, 64),
        (  # two 4-bit weights a byte
            {"w.qweight": ("I32", (2, 4)), "w.scales": ("F16", (4,)), "w.g_idx": ("I32", (3,))},
            {"quant_method": "gptq", "bits": 4},
            64 + 4,
            (64 + 4) * 2 + 12,
        ),
        (
            {"e.gate_up_proj_blocks": ("U8", (2, 16)), "e.bias": ("BF16", (4,))},
            {"quant_method": "mxfp4"},
            64 + 4,
            (64 + 4) * 2,
        ),
    ],
)
def test_quantised_weights_count_as_what_they_become(
    tmp_path: Path,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    quantization: dict[str, Any],
    parameters: int,
    as_bfloat16: int,
) -> None:
    card = read_card(
        write_model(tmp_path / "q", {**LLAMA, "quantization_config": quantization}, tensors)
    )
    assert card.parameters == parameters
    assert card.bytes_in_memory("bfloat16") == as_bfloat16


def test_unknown_quantisation_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "q", {**LLAMA, "quantization_config": {"quant_method": "new"}})
    with pytest.raises(ModelUnusable, match=r"config.json: quantization_config \(new\)"):
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
    assert geometry.kv_values == 2 * 2 * 3 * 4  # every head has its own K and V


@pytest.mark.parametrize(
    ("changes", "kv_values"),
    [
        ({"head_dim": 32}, 2 * 2 * 2 * 32),
        ({"num_key_value_heads": None}, 2 * 2 * 4 * 2),
        ({"num_key_value_heads": [1, 4]}, 2 * (1 + 4) * 2),
        ({"multi_query": True}, 2 * 2 * 1 * 2),
        (
            {
                "kv_lora_rank": 4,
                "qk_nope_head_dim": 6,
                "qk_rope_head_dim": 2,
                "v_head_dim": 5,
            },
            2 * 4 * (8 + 5),
        ),
        (
            {
                "head_dim": 4,
                "global_head_dim": 8,
                "num_global_key_value_heads": 1,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            2 * 2 * 4 + 2 * 1 * 8,
        ),
        ({"layer_types": ["linear_attention", "full_attention"]}, 2 * 2 * 2),
    ],
)
def test_kv_per_token(tmp_path: Path, changes: dict[str, Any], kv_values: int) -> None:
    assert _geometry(tmp_path, **changes).kv_values == kv_values


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
        ("XLMRobertaForSequenceClassification", {}, "rerank"),
        ("T5ForConditionalGeneration", {"is_encoder_decoder": True}, "other"),
    ],
)
def test_kinds(tmp_path: Path, architecture: str, changes: dict[str, Any], kind: str) -> None:
    config = {**LLAMA, "architectures": [architecture], **changes}
    assert read_card(write_model(tmp_path / "m", config)).kind == kind


def test_sentence_transformers_folders_embed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "modules.json").write_text("[]")
    assert read_card(folder).kind == "embed"


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
def test_shapes_are_made_on_demand(tmp_path: Path, shape: str) -> None:
    catalog = Catalog([tmp_path])
    card = catalog.find(f"random:{shape}")
    assert card.source == f"random:{shape}"
    assert card.weight_bytes == card.bytes_in_memory(card.dtype)
    assert catalog.scan() == {f"random:{shape}": card}
    assert {path.name for path in tmp_path.iterdir()} == {f"random:{shape}"}


def test_the_memory_test_shape_has_much_kv_and_few_weights(tmp_path: Path) -> None:
    card = Catalog([tmp_path]).find("random:big-kv")
    assert card.kv_bytes_per_token(4) == 256 << 10
    assert card.context == 131072
    assert card.bytes_in_memory("float32") < 64 << 20


def test_an_unknown_shape_lists_the_known_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="'huge'; the shapes are big-kv, llama-1b"):
        Catalog([tmp_path]).find("random:huge")
    assert not list(tmp_path.iterdir())


def test_a_shape_tokenizer_spells_any_text_and_decodes_every_id() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(shapes.tokenizer(1000)))
    text = "Grüße, 世界 🙂\n\t<|end|> 12"
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert shapes.END in encoded.tokens
    assert len({tokenizer.decode([token]) for token in range(260, 1000)}) == 740


def test_the_catalog_never_imports_torch() -> None:
    code = (
        "import sys, penstock.catalog, penstock.sources, penstock.shapes;"
        "print(sorted({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
