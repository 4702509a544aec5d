"""GGUF files for tests, written by gguf's own library, and what their weights mean by it.

A tiny model's folder becomes a file in llama.cpp's layout: its names, its order of rows, its norms.
Types that the library cannot quantise to get random codes: the numbers need not be the model's.
"""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from penstock.catalog.gguf.checkpoint import read_facts, read_numbers
from penstock.catalog.gguf.configuration import make_config, make_generation_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
# Bytes at which a type has float16 numbers; random ones would be infinite at times.
SCALES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,),
    "IQ4_XS": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q6_K": (208,),
}  # fmt: skip
# About what makes the weights of a block a tenth.
_STEPS = {
    "Q4_0": 0.02, "Q4_1": 0.02, "Q5_0": 0.01, "Q5_1": 0.01, "Q8_0": 1e-3, "IQ4_NL": 1e-3,
    "IQ4_XS": 1e-4, "Q2_K": 5e-3, "Q3_K": 2e-3, "Q4_K": 4e-4, "Q5_K": 2e-4, "Q6_K": 5e-5,
}  # fmt: skip
_METADATA = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def random_rows(name: str, outputs: int, elements: int, seed: int = 0) -> NDArray[np.uint8]:
    """Rows of random blocks of a type."""
    of_block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    chance = np.random.default_rng(seed)
    blocks = outputs * elements // of_block
    if of_block == 1:
        numbers = chance.standard_normal(blocks).astype(np.float16 if name == "F16" else np.float32)
        rows = numbers.view(np.uint8).reshape(blocks, -1)[:, -2:]
    else:
        rows = chance.integers(0, 256, (blocks, size), dtype=np.uint8)
    for at in SCALES.get(name, ()):
        scales = (chance.standard_normal(blocks) * _STEPS[name]).astype(np.float16)
        rows[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return np.ascontiguousarray(rows).reshape(outputs, -1)


def save(
    plain: Path,
    folder: Path,
    kinds: Mapping[str, str],
    *,
    metadata: Mapping[str, Any] | None = None,
) -> tuple[Path, Path]:
    """A tiny model's folder as one with a GGUF file, and as one with the numbers of that file.

    `kinds`: the types of tensors by a pattern of their GGUF names; others are F32.
    """
    config = json.loads((plain / "config.json").read_text())
    numbers = folder.with_name(f"{folder.name}-numbers")
    shutil.copytree(plain, numbers)
    folder.mkdir()
    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config["model_type"]])
    _write_metadata(writer, config, metadata or {})
    meant = {}
    tensors = load_file(plain / "model.safetensors")
    for index, (name, data) in enumerate(_gguf_tensors(tensors, config).items()):
        wanted = [kinds[key] for key in kinds if data.ndim > 1 and re.search(key, name)]
        kind = (wanted or ["F32"])[0]
        stored = _encoded(data, kind, index)
        writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType[kind])
        meant[name] = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])
    for finish in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file"):
        getattr(writer, finish)()
    writer.close()
    save_file(_hf_tensors(meant, config, tensors), numbers / "model.safetensors", {"format": "pt"})
    facts = read_facts(file)
    made = make_config(facts, lambda name: read_numbers(file, name))
    (folder / "config.json").write_text(json.dumps(made))
    (folder / "generation_config.json").write_text(json.dumps(make_generation_config(made)))
    return folder, numbers


def _write_metadata(
    writer: gguf.GGUFWriter, config: dict[str, Any], more: Mapping[str, Any]
) -> None:
    kind = ARCHITECTURES[config["model_type"]]
    for field, name in _METADATA.items():
        value = config.get(field)
        if isinstance(value, float):
            writer.add_float32(f"{kind}.{name}", value)
        elif value is not None:
            writer.add_uint32(f"{kind}.{name}", value)
    rope = config["rope_parameters"]
    theta = rope.get("full_attention", rope)["rope_theta"]
    writer.add_float32(f"{kind}.rope.freq_base", theta)
    for name, value in more.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        add[type(value)](f"{kind}.{name}", value)


def _encoded(data: NDArray[Any], kind: str, seed: int) -> NDArray[Any]:
    if kind == "F32":
        return data
    try:
        encoded: NDArray[Any] = gguf.quants.quantize(data, gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        rows = random_rows(kind, data.size // data.shape[-1], data.shape[-1], seed)
        return rows.reshape(*data.shape[:-1], -1)
    return encoded


_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp", "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+)_proj\.weight")


def _gguf_name(name: str, config: dict[str, Any]) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    layer, part, leaf = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(\w+)", name).groups()  # type: ignore[union-attr]
    gemma = config["model_type"].startswith("gemma")
    after = "post_attention_norm" if gemma else "ffn_norm"
    own = after if part == "post_attention_layernorm" else _PARTS[part]
    return f"blk.{layer}.{own}.{leaf}"


def _gguf_tensors(tensors: dict[str, Any], config: dict[str, Any]) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    stacks: dict[str, dict[int, NDArray[Any]]] = {}
    for name, tensor in tensors.items():
        data = tensor.float().numpy()
        if of := _EXPERT.fullmatch(name):
            layer = of[1].split(".")[2]
            stacks.setdefault(f"blk.{layer}.ffn_{of[3]}_exps.weight", {})[int(of[2])] = data
            continue
        own = _gguf_name(name, config)
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        found[own] = _changed(own, data, config, out=True)
    for name, experts in stacks.items():
        found[name] = np.stack([experts[index] for index in range(len(experts))])
    return found


def _hf_tensors(
    meant: dict[str, NDArray[Any]], config: dict[str, Any], like: dict[str, Any]
) -> dict[str, torch.Tensor]:
    answer = {}
    for name in like:
        if of := _EXPERT.fullmatch(name):
            layer = of[1].split(".")[2]
            numbers = meant[f"blk.{layer}.ffn_{of[3]}_exps.weight"][int(of[2])]
        else:
            own = _gguf_name(name, config)
            if own not in meant:
                continue
            numbers = _changed(own, meant[own], config, out=False)
        answer[name] = torch.from_numpy(np.ascontiguousarray(numbers))
    return answer


def _changed(name: str, data: NDArray[Any], config: dict[str, Any], *, out: bool) -> NDArray[Any]:
    """As llama.cpp's converters change it, or back."""
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return data + (1 if out else -1)
    if config["model_type"] != "llama" or not re.search(r"attn_[qk]\.", name):
        return data
    heads = config["num_attention_heads" if "attn_q" in name else "num_key_value_heads"]
    half = len(data) // heads // 2
    split = (heads, 2, half) if out else (heads, half, 2)
    return data.reshape(*split, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
