"""Tiny random models of many architectures, saved as ordinary model folders.

Small enough to compute in milliseconds, and made so that what an architecture does peculiarly
shows in its tokens: windows far shorter than the prompts, weights wide enough that logits are
well apart, biases and norms that are not the zeros and ones of a fresh initialisation.
No tokenizer: tests speak in token ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig, PreTrainedModel

VOCABULARY = 211
WINDOW = 24  # tokens a row of a sliding layer sees, where the architecture has such layers
CONTEXT = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_SLIDING_AND_FULL = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}

_DELTA_RULE: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_MAMBA_2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_LATENT: dict[str, Any] = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "num_local_experts": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}

# What each architecture has beyond the common fields; the key is its `model_type`.
_PECULIAR: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": _SLIDING_AND_FULL,
    },
    "qwen3": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": _SLIDING_AND_FULL,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": _SLIDING_AND_FULL,
    },
    "mistral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": None},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": _SLIDING_AND_FULL,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen3_moe": {**_EXPERTS, "head_dim": 16},
    "glm4_moe": {
        **_EXPERTS,
        "head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "olmo2": {},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 0.7,
    },
    "cohere2": {"sliding_window": WINDOW, "layer_types": _SLIDING_AND_FULL, "logit_scale": 0.6},
    "starcoder2": {"sliding_window": WINDOW},
    "gpt2": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "stablelm": {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "qwen2_moe": {
        **_EXPERTS,
        "shared_expert_intermediate_size": 48,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": _SLIDING_AND_FULL,
    },
    "phimoe": {"num_local_experts": 4, "sliding_window": WINDOW},
    # Queries are scaled by their position, from the original length on.
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": CONTEXT / WINDOW,
            "original_max_position_embeddings": WINDOW,
            "llama_4_scaling_beta": 0.5,
        },
    },
    # Keys are wider than values.
    "deepseek_v3": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
}
# Recurrent layers beside attention.
_HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_EXPERTS,
        **_DELTA_RULE,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": {**_DELTA_RULE},
    "qwen3_5_moe_text": {**_EXPERTS, **_DELTA_RULE, "shared_expert_intermediate_size": 32},
    "olmo_hybrid": {**{k: v for k, v in _DELTA_RULE.items() if k != "head_dim"}},
    "kimi_linear": {**_LATENT, "linear_head_dim": 16, "linear_num_heads": 4},
    "bailing_hybrid": {**_LATENT, "head_dim": 16, "num_mtp_layers": 0, "n_group": 2},
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {
        **_EXPERTS,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
    },
    "falcon_h1": {**_MAMBA_2, "head_dim": 16, "mamba_d_ssm": 128},
    "bamba": {**_MAMBA_2, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MAMBA_2,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "mamba", "mlp"],
        "num_hidden_layers": 5,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "time_step_limit": (0.05, 0.5),
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "expand": 2,
    },
}
HYBRID = tuple(_HYBRID)
SERVED = tuple(_PECULIAR)

# Architectures whose attention cannot be paged this way: refused at load.
_REFUSED: dict[str, dict[str, Any]] = {
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "alibi": False},
    "bloom": {"n_head": 4},
    "llama4_text": {
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "attention_chunk_size": WINDOW,
        "no_rope_layers": [1, 0, 1],
    },
    "bert": {"is_decoder": False},
    # Scans without a state to begin with, states beside the cache, layers that share a module.
    "mamba": {"state_size": 8},
    "jamba": {"mamba_d_state": 8, "num_experts": 2, "attn_layer_period": 3, "attn_layer_offset": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "recurrent", "attention"]},
    "minimax": {
        "num_local_experts": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "zamba2": {
        "mamba_d_state": 16,
        "n_mamba_heads": 8,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "num_key_value_heads": 4,
    },
}
REFUSED = tuple(_REFUSED)


def config(architecture: str, **changes: Any) -> PretrainedConfig:
    """The configuration of a tiny model; `changes` replace its fields."""
    known = _PECULIAR | _HYBRID | _REFUSED
    peculiar = known.get(architecture, {})
    fields = {**_COMMON, **peculiar, **changes}
    made: PretrainedConfig = AutoConfig.for_model(architecture, **fields)
    return made


def build(of: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, float32, that are the same for the same seed."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(of, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases, norms and sinks start as zeros, ones or noise
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model.eval()


def save(architecture: str, folder: Path, **changes: Any) -> Path:
    """Write a tiny model's folder: configuration and safetensors."""
    build(config(architecture, **changes)).save_pretrained(folder)
    return folder


def prompt(length: int, seed: int) -> list[int]:
    """Token ids, the same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    ids: list[int] = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
    return ids
