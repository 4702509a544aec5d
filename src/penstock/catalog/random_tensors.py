"""The headers that a `random:` shape with packed weights would have, if it had files.

What the catalog books and what the worker makes up are both read from them, as of any checkpoint.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from penstock.catalog.linear_formats import GGUF_BLOCKS, BlockFp8, quantisation
from penstock.catalog.linear_formats.gguf import GGUF
from penstock.catalog.weights import Tensor
from penstock.errors import ModelUnusable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PLAIN = "BF16"
_ITEM_BYTES = {"BF16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1}
_FAMILIES = ("llama", "qwen3")
_CODES_OF_WORD = 8

_Shape = tuple[int, int]


def random_tensors(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """By name, for a configuration of dense layers with a `quantization_config`: those of layers
    are packed, embeddings and the head are not."""
    family, said = config.get("model_type"), quantisation(config)
    method = str(said.get("quant_method"))
    if family not in _FAMILIES or method not in _PACKED:
        raise ModelUnusable(
            f"Random packed weights exist for {' and '.join(_FAMILIES)} shapes in "
            f"{', '.join(_PACKED)}, not for {family!r} in {method!r}."
        )
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    tensors = {
        "model.embed_tokens.weight": _tensor(_PLAIN, vocabulary, hidden),
        "model.norm.weight": _tensor(_PLAIN, hidden),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = _tensor(_PLAIN, vocabulary, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for norm, width in _norms(config).items():
            tensors[f"{layer}.{norm}.weight"] = _tensor(_PLAIN, width)
        for name, shape in _linears(config).items():
            parts = _PACKED[method](shape, said)
            tensors.update({f"{layer}.{name}.{leaf}": part for leaf, part in parts.items()})
    return tensors


def _norms(config: Mapping[str, Any]) -> dict[str, int]:
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), config["hidden_size"])
    if config["model_type"] == "qwen3":
        norms |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), config["head_dim"])
    return norms


def _linears(config: Mapping[str, Any]) -> dict[str, _Shape]:
    """Outputs and inputs."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key_value = config["num_key_value_heads"] * config["head_dim"]
    return {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def _fp8(shape: _Shape, said: Mapping[str, Any]) -> dict[str, Tensor]:
    scales = BlockFp8().scales_shape(shape)
    return {"weight": _tensor("F8_E4M3", *shape), "weight_scale_inv": _tensor("F32", *scales)}


def _compressed(shape: _Shape, said: Mapping[str, Any]) -> dict[str, Tensor]:
    (scheme,) = said["config_groups"].values()
    outputs, inputs = shape
    return {
        "weight_packed": _tensor("I32", outputs, inputs // _CODES_OF_WORD),
        "weight_scale": _tensor(_PLAIN, outputs, inputs // scheme["weights"]["group_size"]),
    }


def _gguf(shape: _Shape, said: Mapping[str, Any]) -> dict[str, Tensor]:
    block = GGUF_BLOCKS[said["block"]].block
    size = math.prod(shape) // block.elements * block.size_bytes
    return {"weight": Tensor(f"{GGUF}{block.name}", shape, size)}


_PACKED: dict[str, Callable[[_Shape, Mapping[str, Any]], dict[str, Tensor]]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "gguf": _gguf,
}


def _tensor(dtype: str, *shape: int) -> Tensor:
    return Tensor(dtype, shape, math.prod(shape) * _ITEM_BYTES[dtype])
