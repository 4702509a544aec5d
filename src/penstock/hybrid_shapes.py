"""Shapes of models with recurrent layers, from public configurations; and how many weights they
have. No torch, no transformers."""

from __future__ import annotations

from typing import Any

_GATED_DELTA: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
    },
    "dtype": "bfloat16",
}


def _every_fourth(count: int) -> list[str]:
    return (["linear_attention"] * 3 + ["full_attention"]) * (count // 4)


SHAPES: dict[str, dict[str, Any]] = {
    # 3 of 4 layers keep a state: 19 MB of a sequence, as much as its KV of 800 tokens in float32.
    "qwen3.5-0.8b": {
        **_GATED_DELTA,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "layer_types": _every_fourth(24),
        "num_attention_heads": 8,
        "linear_num_value_heads": 16,
        "vocab_size": 248320,
        "tie_word_embeddings": True,
    },
    "qwen3-next-80b-a3b": {
        **_GATED_DELTA,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "layer_types": _every_fourth(48),
        "num_attention_heads": 16,
        "linear_num_value_heads": 32,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    # Short convolutions only: 160 KB of a sequence.
    "lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 16,
        "layer_types": [
            "full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)
        ],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "max_position_embeddings": 128000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "vocab_size": 65536,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    # No attention at all.
    "mamba2-370m": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_size": 1024,
        "num_hidden_layers": 48,
        "num_heads": 32,
        "head_dim": 64,
        "expand": 2,
        "state_size": 128,
        "n_groups": 1,
        "conv_kernel": 4,
        "chunk_size": 256,
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 131072,
        "vocab_size": 50288,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
}


def count_parameters(config: dict[str, Any]) -> int | None:
    """Exactly the parameters that transformers builds; None for another family. KeyError: a field
    is missing."""
    count = _COUNTS.get(config.get("model_type", ""))
    if count is None:
        return None
    hidden = config["hidden_size"]
    embedding = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
    return int(embedding + hidden + count(config))


def _gated_delta_layers(config: dict[str, Any]) -> int:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if config["model_type"] == "qwen3_next":
        experts = config["num_experts"]
        shared = 3 * hidden * config["shared_expert_intermediate_size"] + hidden
        feed_forward = experts * (3 * hidden * config["moe_intermediate_size"] + hidden) + shared
    else:
        feed_forward = 3 * hidden * inner
    size = config["head_dim"]
    query, key = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    attention = hidden * (3 * query + 2 * key) + 2 * size  # queries have a gate
    heads, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
    values = heads * width
    columns = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    mixer = hidden * (columns + values + 2 * heads) + values * hidden
    mixer += columns * config["linear_conv_kernel_dim"] + 2 * heads + width
    parts = {"full_attention": attention, "linear_attention": mixer}
    each = feed_forward + 2 * hidden
    return sum(parts[kind] + each for kind in config["layer_types"])


def _short_conv_layers(config: dict[str, Any]) -> int:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = hidden // config["num_attention_heads"]
    keys = config["num_key_value_heads"] * size
    attention = hidden * (2 * hidden + 2 * keys) + 2 * size
    mixer = 4 * hidden * hidden + hidden * config["conv_L_cache"]
    parts = {"full_attention": attention, "conv": mixer}
    each = 3 * hidden * inner + 2 * hidden
    return sum(parts[kind] + each for kind in config["layer_types"])


def _mamba2_layers(config: dict[str, Any]) -> int:
    hidden, heads = config["hidden_size"], config["num_heads"]
    inner = heads * config["head_dim"]
    columns = inner + 2 * config["n_groups"] * config["state_size"]
    mixer = hidden * (inner + columns + heads) + inner * hidden + inner
    mixer += columns * (config["conv_kernel"] + 1) + 3 * heads
    return int(config["num_hidden_layers"] * (mixer + hidden))


_COUNTS = {
    "qwen3_5_text": _gated_delta_layers,
    "qwen3_next": _gated_delta_layers,
    "lfm2": _short_conv_layers,
    "mamba2": _mamba2_layers,
}
