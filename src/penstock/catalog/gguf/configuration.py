"""transformers' `config.json` and `generation_config.json` from the metadata of a GGUF file.

Only architectures whose every number is in the metadata or fixed by llama.cpp's own code for them
are here; any other is refused with its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.catalog.gguf.rotation import rope_parameters
from penstock.errors import ModelUnusable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from penstock.catalog.gguf.header import GgufTensor, Metadata

    # Numbers of a small float32 tensor of the file, by name.
    Numbers = Callable[[str], list[float]]

Config = dict[str, Any]
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_GEMMA3_RHYTHM = 6  # one layer in so many sees all of the context


class Facts:
    """A file's metadata for its architecture, checked where they are asked for."""

    def __init__(self, metadata: Metadata, tensors: Mapping[str, GgufTensor], path: Path) -> None:
        self.metadata = metadata
        self.tensors = tensors
        self.path = path
        self.architecture = str(metadata.get("general.architecture"))

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ModelUnusable(
                f"{self.path}: {self.architecture}.{name} is {value!r}, not a positive integer."
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Any other number."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise ModelUnusable(
                f"{self.path}: {self.architecture}.{name} is {value!r}, not a number."
            )
        return float(value)

    def has(self, name: str) -> bool:
        """Whether the architecture's metadata have it."""
        return f"{self.architecture}.{name}" in self.metadata

    def token_id(self, name: str) -> int | None:
        """The id of a special token, if it is in the vocabulary."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < self.vocabulary else None

    @property
    def vocabulary(self) -> int:
        """How many tokens have an embedding."""
        embeddings = self.tensors.get("token_embd.weight")
        if embeddings is None or len(embeddings.shape) != 2:
            raise ModelUnusable(f"{self.path} has no table of embeddings (token_embd.weight).")
        return embeddings.shape[0]


def make_config(facts: Facts, numbers: Numbers) -> Config:
    """The configuration; `numbers` reads a tensor that belongs to it."""
    kind = _KINDS.get(facts.architecture)
    if kind is None:
        raise ModelUnusable(
            f"{facts.path} is of the architecture {facts.architecture}; GGUF files are served of "
            f"{', '.join(sorted(_KINDS))}. Use the model's safetensors version, or try "
            "`penstock pull --convert float32`."
        )
    return {**_common(facts, numbers), **kind(facts)}


def make_generation_config(config: Config) -> Config:
    """What ends an answer."""
    return {name: config[name] for name in ("bos_token_id", "eos_token_id")}


def end_token_ids(facts: Facts) -> list[int]:
    """Every id that ends an answer: end of sequence, of turn, of message."""
    found = (facts.token_id(name) for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token_id for token_id in found if token_id is not None))


def head_dim(facts: Facts) -> int:
    """Numbers of a head's query and key."""
    usual = facts.count("embedding_length") // facts.count("attention.head_count")
    if facts.architecture == "llama":  # older files have nothing else
        usual = facts.count("rope.dimension_count", usual)
    return facts.count("attention.key_length", usual)


def _common(facts: Facts, numbers: Numbers) -> Config:
    ends = end_token_ids(facts)
    if facts.has("expert_count") and facts.architecture != "qwen3moe":
        raise ModelUnusable(
            f"{facts.path}: experts of the architecture {facts.architecture} are not served from "
            "GGUF files; use the model's safetensors version."
        )
    return {
        "hidden_size": facts.count("embedding_length"),
        "intermediate_size": facts.count("feed_forward_length"),
        "num_hidden_layers": facts.count("block_count"),
        "num_attention_heads": facts.count("attention.head_count"),
        "num_key_value_heads": facts.count(
            "attention.head_count_kv", facts.count("attention.head_count")
        ),
        "head_dim": head_dim(facts),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": facts.count("context_length"),
        "vocab_size": facts.vocabulary,
        "tie_word_embeddings": "output.weight" not in facts.tensors,
        "rope_parameters": rope_parameters(facts, numbers),
        "bos_token_id": facts.token_id("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": facts.token_id("padding"),
        "dtype": "bfloat16",  # what a GPU computes in; a CPU takes float32
    }


def _llama(facts: Facts) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": "blk.0.attn_q.bias" in facts.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in facts.tensors,
        "hidden_act": "silu",
    }


def _qwen2(_facts: Facts) -> Config:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "use_sliding_window": False,
    }


def _qwen3(_facts: Facts) -> Config:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "use_sliding_window": False,
        "attention_bias": False,
    }


def _qwen3moe(facts: Facts) -> Config:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "use_sliding_window": False,
        "attention_bias": False,
        "num_experts": facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
        "moe_intermediate_size": facts.count("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp knows nothing else
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _phi3(facts: Facts) -> Config:
    config: Config = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_act": "silu",
        "sliding_window": None,
    }
    if facts.has("rope.dimension_count"):
        config["partial_rotary_factor"] = facts.count("rope.dimension_count") / head_dim(facts)
    if facts.has("attention.sliding_window") and facts.metadata["phi3.attention.sliding_window"]:
        config["sliding_window"] = facts.count("attention.sliding_window")
    original = "rope.scaling.original_context_length"
    config["original_max_position_embeddings"] = facts.count(
        original, facts.count("context_length")
    )
    return config


def _gemma(facts: Facts) -> Config:
    # The largest of each generation scales its queries by another number.
    largest = facts.count("block_count") == _GEMMA_27B_LAYERS[facts.architecture]
    evenly = facts.count("embedding_length") // facts.count("attention.head_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": evenly if largest else head_dim(facts),
        "sliding_window": facts.count("attention.sliding_window"),
        "attention_bias": False,
    }


def _gemma2(facts: Facts) -> Config:
    return {
        **_gemma(facts),
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
    }


def _gemma3(facts: Facts) -> Config:
    kinds = ("full_attention", "sliding_attention")
    return {
        **_gemma(facts),
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "layer_types": [
            kinds[(layer + 1) % _GEMMA3_RHYTHM != 0] for layer in range(facts.count("block_count"))
        ],
    }


_KINDS: dict[str, Callable[[Facts], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
