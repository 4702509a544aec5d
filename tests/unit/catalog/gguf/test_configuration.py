"""Configurations from GGUF metadata: rotary embeddings, refusals, and cards of whole folders."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from penstock.catalog.gguf.blocks import BY_NAME
from penstock.catalog.gguf.configuration import Facts, make_config
from penstock.catalog.gguf.header import GgufTensor
from penstock.catalog.gguf.names import Change, place_of
from penstock.catalog.gguf.rotation import llama3_divisors
from penstock.errors import ModelUnusable

LLAMA: dict[str, Any] = {
    "embedding_length": 64,
    "feed_forward_length": 96,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "context_length": 256,
    "rope.freq_base": 500000.0,
}


def facts(architecture: str = "llama", *tensors: str, **changes: Any) -> Facts:
    metadata = {f"{architecture}.{name}": value for name, value in (LLAMA | changes).items()}
    metadata |= {"general.architecture": architecture, "tokenizer.ggml.eos_token_id": 2}
    metadata |= {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.bos_token_id": 99999}
    entry = GgufTensor(BY_NAME["Q8_0"], (300, 64), 0, 0)
    return Facts(metadata, dict.fromkeys(("token_embd.weight", *tensors), entry), Path("m.gguf"))


def no_numbers(name: str) -> list[float]:
    raise AssertionError(name)


def test_a_configuration_has_what_the_metadata_say() -> None:
    config = make_config(facts(), no_numbers)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["vocab_size"], config["head_dim"]) == (64, 300, 16)
    assert (config["tie_word_embeddings"], config["attention_bias"]) == (True, False)
    assert config["rope_parameters"] == {"rope_theta": 500000.0, "rope_type": "default"}
    # An id beyond the vocabulary is none.
    assert (config["eos_token_id"], config["bos_token_id"]) == ([2, 7], None)
    untied = make_config(facts("llama", "output.weight", "blk.0.attn_q.bias"), no_numbers)
    assert (untied["tie_word_embeddings"], untied["attention_bias"]) == (False, True)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3s_scaling_is_found_by_its_divisors(factor: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    divisors = llama3_divisors(factor, 500000.0, 16)
    config = make_config(facts("llama", "rope_freqs.weight"), lambda _: divisors)
    assert config["rope_parameters"]["factor"] == factor
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), "cpu")
    plain = [500000.0 ** (-2 * pair / 16) for pair in range(8)]
    for frequency, whole, divisor in zip(theirs.tolist(), plain, divisors, strict=True):
        assert math.isclose(frequency, whole / divisor, rel_tol=1e-5)
    with pytest.raises(ModelUnusable, match=r"rope_freqs\.weight is not the scaling of Llama 3"):
        make_config(facts("llama", "rope_freqs.weight"), lambda _: [1.5 * d for d in divisors])


def test_yarn_and_linear_are_carried_over() -> None:
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    found = make_config(facts("qwen2", **yarn), no_numbers)["rope_parameters"]
    assert (found["rope_type"], found["factor"]) == ("yarn", 4.0)
    assert found["original_max_position_embeddings"] == 64
    odd = yarn | {"rope.scaling.yarn_log_multiplier": 0.1}
    with pytest.raises(ModelUnusable, match="by yarn in a way that is not known"):
        make_config(facts("qwen2", **odd), no_numbers)
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    local = {"attention.sliding_window": 32, "attention.key_length": 16}
    found = make_config(facts("gemma3", **linear, **local), no_numbers)["rope_parameters"]
    assert found["full_attention"]["factor"] == 8.0
    assert found["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("architecture", "changes", "sentence"),
    [
        ("mamba", {}, r"of the architecture mamba; GGUF files are served of gemma2, gemma3, llama"),
        ("llama", {"expert_count": 8}, r"experts of the architecture llama are not served"),
        ("llama", {"block_count": 0}, r"llama\.block_count is 0, not a positive integer"),
        ("llama", {"block_count": "3"}, r"llama\.block_count is '3'"),
        ("llama", {"rope.freq_base": float("nan")}, r"rope\.freq_base is nan, not a number"),
        ("llama", {"rope.scaling.type": "other"}, r"scales its rotary embedding by 'other'"),
    ],
)
def test_what_is_not_known_is_refused(
    architecture: str, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ModelUnusable, match=sentence):
        make_config(facts(architecture, **changes), no_numbers)


def test_places_of_tensors() -> None:
    path = Path("m.gguf")
    query = place_of("blk.3.attn_q.weight", "llama", path)
    assert query is not None
    assert (query.name, query.change) == ("model.layers.3.self_attn.q_proj.weight", Change.PAIRED)
    query = place_of("blk.3.attn_q.bias", "qwen2", path)
    assert query is not None
    assert (query.name, query.change) == ("model.layers.3.self_attn.q_proj.bias", Change.NONE)
    norm = place_of("blk.0.ffn_norm.weight", "gemma3", path)
    assert norm is not None
    assert norm.name == "model.layers.0.pre_feedforward_layernorm.weight"
    assert norm.change is Change.PLUS_ONE
    assert place_of("rope_freqs.weight", "llama", path) is None
    with pytest.raises(ModelUnusable, match=r"blk\.0\.ssm_a\.weight has no place in a model"):
        place_of("blk.0.ssm_a.weight", "llama", path)
